"""A registrar keeps an embedded engine at the newest published policy, whatever fails on the way."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import tiny_lm
from agentrl.errors import EngineError
from agentrl.inference import EngineClient, RoutedClient
from agentrl.store import MemoryStore
from agentrl.types import GenerateRequest, InferenceService, PolicyVersion, SamplingParams, ServiceStatus
from engine_process import engine_processes
from engine_targets import EngineTarget, embedded_target
from registered_engine import is_down, registered, service_when, up_at

WAIT_S = 20.0


@pytest.fixture(scope="module")
def running_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineTarget]:
    with embedded_target(tmp_path_factory.mktemp("engine"), kind="qwen3") as target:
        yield target


@pytest.fixture
async def engine(running_engine: EngineTarget) -> EngineTarget:
    await running_engine.reset()
    return running_engine


def ask(
    rid: str,
    *,
    prompt: Sequence[int] = (3, 4, 5),
    max_new_tokens: int = 4,
    temperature: float = 1.0,
    deadline_s: float = WAIT_S,
) -> GenerateRequest:
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature)
    return GenerateRequest(rid=rid, input_ids=list(prompt), params=params, deadline_s=deadline_s)


def _prompt_without_early_end(engine: EngineTarget) -> list[int]:
    """A prompt whose greedy continuation is long: it is still running when the new policy comes."""
    for first in range(2, tiny_lm.VOCAB_SIZE):
        if tiny_lm.EOS_ID not in tiny_lm.greedy_ids(engine.reference(0), [first, 4, 5], max_new_tokens=450):
            return [first, 4, 5]
    raise AssertionError("every greedy continuation ends early")


async def test_without_a_published_policy_the_initial_model_is_version_zero(
    engine: EngineTarget, memory_store: MemoryStore
) -> None:
    async with registered(engine.base_url, memory_store):
        service = await service_when(memory_store, up_at(0))
        assert (service.base_url, service.engine) == (engine.base_url, "embedded")
    assert is_down((await memory_store.list_services())[0])


async def test_a_published_policy_is_loaded_without_losing_running_generations(
    engine: EngineTarget, memory_store: MemoryStore
) -> None:
    router = RoutedClient(memory_store, vocab_size=tiny_lm.VOCAB_SIZE)
    async with registered(engine.base_url, memory_store):
        await service_when(memory_store, up_at(0))
        prompt = _prompt_without_early_end(engine)
        requests = [ask(f"r{index}", prompt=prompt, max_new_tokens=450, temperature=0.0) for index in range(8)]
        running = [asyncio.create_task(router.generate(request)) for request in requests]
        await engine.wait_until_running(8)
        await memory_store.publish_policy(PolicyVersion(version=1, path=str(engine.model_dirs[1])))
        await service_when(memory_store, up_at(1))
        replies = await asyncio.gather(*running)
    for reply in replies:
        assert [span.version for span in reply.version_spans] == [0, 1]
        position = 0
        for span in reply.version_spans:
            model = engine.reference(span.version)
            expected = tiny_lm.expected_logprobs(model, prompt, reply.output_ids[: span.end])
            assert expected[position:].tolist() == pytest.approx(reply.logprobs[position : span.end], abs=1e-4)
            position = span.end
    await router.close()


async def test_a_policy_that_cannot_be_loaded_takes_the_service_down_until_a_good_one_comes(
    engine: EngineTarget, memory_store: MemoryStore, tmp_path: Path
) -> None:
    async with registered(engine.base_url, memory_store):
        await service_when(memory_store, up_at(0))
        running = asyncio.create_task(engine.generate([3, 4], max_new_tokens=400, ignore_eos=True))
        await engine.wait_until_running(1)
        await memory_store.publish_policy(PolicyVersion(version=1, path=str(tmp_path / "gone")))
        await service_when(memory_store, is_down)
        spans = (await running).body["meta_info"]["weight_versions"]
        assert [span["version"] for span in spans] == ["0"]
        await memory_store.publish_policy(PolicyVersion(version=2, path=str(engine.model_dirs[1])))
        await service_when(memory_store, up_at(2))
    info = await engine.model_info()
    assert (info["weight_version"], info["model_path"]) == ("2", str(engine.model_dirs[1]))


async def test_weights_that_changed_behind_the_registrars_back_are_noticed(
    engine: EngineTarget, memory_store: MemoryStore
) -> None:
    await memory_store.publish_policy(PolicyVersion(version=5, path=str(engine.model_dirs[1])))
    async with registered(engine.base_url, memory_store):
        await service_when(memory_store, up_at(5))
        await engine.update(0, "0")  # what a restart would look like
        async with asyncio.timeout(WAIT_S):
            while (await engine.model_info())["weight_version"] != "5":
                await asyncio.sleep(0.01)
        await service_when(memory_store, up_at(5))


async def test_a_service_left_paused_by_a_dead_registrar_comes_back(
    engine: EngineTarget, memory_store: MemoryStore
) -> None:
    await memory_store.publish_policy(PolicyVersion(version=0, path=str(engine.model_dirs[0])))
    await engine.call("POST", "/pause_generation", {"mode": "retract"})
    async with registered(engine.base_url, memory_store):
        await service_when(memory_store, up_at(0))
        assert (await engine.generate([3], max_new_tokens=2)).status == 200


async def test_killed_and_frozen_engines_are_survived(memory_store: MemoryStore, tmp_path: Path) -> None:
    """One engine dies, later the other freezes: every request is answered by whoever is left."""
    model_dir = tiny_lm.write_lm(tmp_path / "model")
    router = RoutedClient(memory_store, vocab_size=tiny_lm.VOCAB_SIZE, heartbeat_timeout_s=1.0, refresh_s=0.1)
    with engine_processes(model_dir, count=2) as (first, second):
        async with _kept_alive(memory_store, {"first": first.base_url, "second": second.base_url}) as beats:
            before = await asyncio.gather(*(router.generate(ask(f"a{index}")) for index in range(6)))
            assert {reply.service_id for reply in before} == {"first", "second"}
            running = [asyncio.create_task(router.generate(ask(f"b{index}", max_new_tokens=400))) for index in range(8)]
            async with EngineClient(first.base_url) as client, asyncio.timeout(WAIT_S):
                while (await client.load()).num_running == 0:
                    await asyncio.sleep(0.01)
            first.send(signal.SIGKILL)
            assert all(reply.service_id in {"first", "second"} for reply in await asyncio.gather(*running))
            assert (await router.generate(ask("c"))).service_id == "second"
            second.send(signal.SIGSTOP)
            beats.pop("second").cancel()
            with pytest.raises(EngineError):
                await router.generate(ask("d", deadline_s=2.5))
            second.send(signal.SIGCONT)
            await memory_store.put_service(_service("second", second.base_url))
            assert (await router.generate(ask("e"))).service_id == "second"
    await router.close()


@asynccontextmanager
async def _kept_alive(fleet: MemoryStore, urls: dict[str, str]) -> AsyncIterator[dict[str, asyncio.Task[None]]]:
    async def beat(service_id: str, url: str) -> None:
        while True:
            await fleet.put_service(_service(service_id, url))
            await asyncio.sleep(0.2)

    tasks = {service_id: asyncio.create_task(beat(service_id, url)) for service_id, url in urls.items()}
    await asyncio.sleep(0)
    try:
        yield tasks
    finally:
        for task in tasks.values():
            task.cancel()


def _service(service_id: str, url: str) -> InferenceService:
    return InferenceService(id=service_id, base_url=url, status=ServiceStatus.UP, policy_version=0)


async def test_an_engine_that_is_gone_is_marked_down(memory_store: MemoryStore, tmp_path: Path) -> None:
    model_dir = tiny_lm.write_lm(tmp_path / "model")
    with engine_processes(model_dir, count=1) as (process,):
        async with registered(process.base_url, memory_store):
            await service_when(memory_store, up_at(0))
            process.send(signal.SIGKILL)
            await service_when(memory_store, is_down)
