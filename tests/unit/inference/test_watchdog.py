"""An engine whose thread is stuck is called failed; one that works or loads weights is not."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

import tiny_lm
from agentrl.inference.engine import Engine
from agentrl.inference.runner import EngineSettings
from agentrl.inference.serve import build_engine
from agentrl.inference.watchdog import fail_when_stuck


@pytest.fixture
def engine(tmp_path) -> Iterator[Engine]:
    model_dir = tiny_lm.write_lm(tmp_path / "model", kind="qwen3", seed=1)
    engine, _ = build_engine(
        EngineSettings(model_path=model_dir, context_length=tiny_lm.CONTEXT_LENGTH, seed=7, device="cpu")
    )
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture
def stuck(engine) -> Iterator[Engine]:
    """Its thread waits for something that comes when the test is over."""
    release = threading.Event()
    engine._post(release.wait)
    yield engine
    release.set()


async def test_a_stuck_engine_thread_fails_the_engine_and_whoever_waits_is_told(stuck):
    told = threading.Event()
    stuck.on_failure = told.set
    async with asyncio.timeout(10):
        await fail_when_stuck(stuck, look_s=0.01, limit_s=0.1)
    assert isinstance(stuck.failure, TimeoutError)
    assert told.is_set()


async def test_an_engine_that_works_or_loads_weights_is_left_alone(engine, request):
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await fail_when_stuck(engine, look_s=0.01, limit_s=0.1)
    stuck = request.getfixturevalue("stuck")
    stuck.is_loading = True
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await fail_when_stuck(stuck, look_s=0.01, limit_s=0.1)
    assert engine.failure is None
