"""`serve`: engine, HTTP server and registrar in one process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

import tiny_lm
from agentrl.config.sections import RunConfig
from agentrl.errors import EngineError, EngineErrorKind, UnavailableError
from agentrl.inference import RoutedClient
from agentrl.inference.runner import ModelRunner
from agentrl.inference.serve import serve
from agentrl.store import MemoryStore
from agentrl.types import GenerateRequest, InferenceService, PolicyVersion, SamplingParams, ServiceStatus
from engine_targets import embedded_target

WAIT_S = 30.0


def config(model_dir: Path | None, **inference: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"model_name_or_path": model_dir},
            "store": {"heartbeat_s": 0.1},
            "inference": {"context_length": 128, "max_running_requests": 4, "policy_poll_s": 0.02, **inference},
        }
    )


async def up(fleet: MemoryStore, *, version: int) -> InferenceService:
    async with asyncio.timeout(WAIT_S):
        while True:
            for service in await fleet.list_services():
                if service.status is ServiceStatus.UP and service.policy_version == version:
                    return service
            await asyncio.sleep(0.01)


async def test_serves_the_newest_policy_until_sigterm_and_leaves_as_down(
    memory_store: MemoryStore, tmp_path: Path
) -> None:
    first = tiny_lm.write_lm(tmp_path / "first", seed=1)
    second = tiny_lm.write_lm(tmp_path / "second", seed=2)
    await memory_store.publish_policy(PolicyVersion(version=7, path=str(second)))
    serving = asyncio.create_task(serve(config(first), memory_store))
    service = await up(memory_store, version=7)
    assert service.engine == "embedded"
    router = RoutedClient(memory_store)
    request = GenerateRequest(rid="r", input_ids=[5, 6], params=SamplingParams(max_new_tokens=5), deadline_s=WAIT_S)
    reply = await router.generate(request)
    assert [span.version for span in reply.version_spans] == [7]
    expected = tiny_lm.expected_logprobs(tiny_lm.load_lm(second), [5, 6], reply.output_ids)
    assert expected.tolist() == pytest.approx(reply.logprobs, abs=1e-4)
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(WAIT_S):
        await serving
    assert [item.status for item in await memory_store.list_services()] == [ServiceStatus.DOWN]
    await router.close()


async def test_cancelling_marks_the_service_down(memory_store: MemoryStore, tmp_path: Path) -> None:
    serving = asyncio.create_task(serve(config(tiny_lm.write_lm(tmp_path / "model")), memory_store))
    await up(memory_store, version=0)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert [item.status for item in await memory_store.list_services()] == [ServiceStatus.DOWN]


async def test_given_urls_are_registered_and_no_engine_is_started(memory_store: MemoryStore, tmp_path: Path) -> None:
    with embedded_target(tmp_path, kind="llama") as running:
        serving = asyncio.create_task(serve(config(None, inference_url=running.base_url), memory_store))
        service = await up(memory_store, version=0)
        assert (service.base_url, service.engine) == (running.base_url, "sglang")
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        assert (await running.generate([5], max_new_tokens=1)).status == 200


async def test_an_engine_that_breaks_ends_serve_with_an_error(
    memory_store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_args: object) -> None:
        raise RuntimeError("out of memory")

    serving = asyncio.create_task(serve(config(tiny_lm.write_lm(tmp_path / "model")), memory_store))
    await up(memory_store, version=0)
    monkeypatch.setattr(ModelRunner, "prefill", broken)
    router = RoutedClient(memory_store)
    request = GenerateRequest(rid="r", input_ids=[5], params=SamplingParams(max_new_tokens=50), deadline_s=5.0)
    with pytest.raises(EngineError):
        await router.generate(request)
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(EngineError, match="out of memory") as caught:
            await serving
    assert caught.value.kind is EngineErrorKind.UNREACHABLE
    await router.close()


async def test_a_port_in_use_is_named(memory_store: MemoryStore, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UnavailableError, match=rf"serve_port = {port} .* in use"):
            await serve(config(tmp_path, serve_port=port), memory_store)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
async def test_an_incomplete_model_directory_is_named(memory_store: MemoryStore, tmp_path: Path, missing: str) -> None:
    model_dir = tiny_lm.write_lm(tmp_path / "model")
    (model_dir / missing).unlink()
    if missing == "tokenizer.json":
        (model_dir / "tokenizer_config.json").unlink()
    with pytest.raises(UnavailableError, match="model_name_or_path"):
        await serve(config(model_dir), memory_store)
    assert await memory_store.list_services() == []
