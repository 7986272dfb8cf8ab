"""The inference services every conformance test runs against."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from engine_targets import EngineTarget, embedded_target, sglang_target


@pytest.fixture(scope="module", params=["qwen3", "llama", pytest.param("sglang", marks=pytest.mark.sglang)])
def running_target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineTarget]:
    """One service per module and kind; starting it is the expensive part."""
    if request.param == "sglang":
        target = sglang_target()
        if target is None:
            pytest.skip("SGLANG_URL is not set: no real SGLang to test against (tests/sglang/run.sh starts one)")
        yield target
        return
    with embedded_target(tmp_path_factory.mktemp(request.param), kind=request.param) as target:
        yield target


@pytest.fixture
async def target(running_target: EngineTarget) -> AsyncIterator[EngineTarget]:
    """The service in its initial state."""
    await running_target.reset()
    yield running_target
    await running_target.call("POST", "/continue_generation", {})
