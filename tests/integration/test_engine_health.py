"""Engines that hang, stay paused, come back old or compute wrongly are taken out, and return only when right again."""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import tiny_lm
from agentrl.algo.suspects import spoiled_by
from agentrl.config.sections import InferenceConfig
from agentrl.errors import EngineError
from agentrl.inference import EngineClient, RoutedClient
from agentrl.inference.canary import CanarySettings
from agentrl.inference.runner import EngineSettings
from agentrl.inference.serve import build_engine, listen, running_server
from agentrl.store import MemoryStore
from agentrl.types import (
    EngineUse,
    GenerateReply,
    GenerateRequest,
    InferenceService,
    PolicyVersion,
    SamplingParams,
    ServiceStatus,
)
from engine_process import engine_processes
from engine_targets import EngineTarget, embedded_target
from registered_engine import WAIT_S, is_down, reference_of, registered, service_when, up_at


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineTarget]:
    with embedded_target(tmp_path_factory.mktemp("engine"), kind="qwen3") as target:
        yield target


@pytest.fixture
async def engine(engines: EngineTarget) -> EngineTarget:
    await engines.reset()
    return engines


def ask(rid: str, *, deadline_s: float = WAIT_S, max_new_tokens: int = 4) -> GenerateRequest:
    params = SamplingParams(max_new_tokens=max_new_tokens)
    return GenerateRequest(rid=rid, input_ids=[3, 4, 5], params=params, deadline_s=deadline_s)


def is_quarantined(service: InferenceService) -> bool:
    return service.status is ServiceStatus.QUARANTINED


@asynccontextmanager
async def routed(fleet: MemoryStore) -> AsyncIterator[RoutedClient]:
    router = RoutedClient(fleet, vocab_size=tiny_lm.VOCAB_SIZE, heartbeat_timeout_s=1.0, refresh_s=0.1)
    try:
        yield router
    finally:
        await router.close()


# --- wrong weights --------------------------------------------------------------------------------------------------


async def test_a_service_whose_canaries_agree_with_the_trainer_is_up(
    engine: EngineTarget, memory_store: MemoryStore
) -> None:
    policy = PolicyVersion(version=1, path=str(engine.model_dirs[1]), canary=reference_of(engine, 1))
    await memory_store.publish_policy(policy)
    async with registered(engine.base_url, memory_store):
        first = await service_when(memory_store, up_at(1))
        later = await service_when(memory_store, lambda service: service.last_good_s > first.last_good_s)
    assert first.canary is not None
    assert first.canary.policy_version == 1
    assert first.canary.logprobs == pytest.approx(reference_of(engine, 1).logprobs, abs=1e-4)
    assert later.status is ServiceStatus.UP
    assert await memory_store.list_engine_quarantines() == []


async def test_a_service_with_wrong_weights_is_quarantined_and_returns_after_a_reload_of_the_right_ones(
    engine: EngineTarget, memory_store: MemoryStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder of version 1 holds other weights than the trainer had: every label is right, every token wrong."""
    folder = tmp_path / "v1"
    shutil.copytree(engine.model_dirs[0], folder)
    async with registered(engine.base_url, memory_store), routed(memory_store) as router:
        await service_when(memory_store, up_at(0))
        reference = reference_of(engine, 1)
        with caplog.at_level(logging.ERROR):
            await memory_store.publish_policy(PolicyVersion(version=1, path=str(folder), canary=reference))
            quarantined = await service_when(memory_store, is_quarantined)
            with pytest.raises(EngineError, match="no inference service was UP"):
                await router.generate(ask("nobody", deadline_s=0.5))
        (span,) = await memory_store.list_engine_quarantines()
        assert (span.service_id, span.policy_version, span.until_s) == ("s", 1, None)
        assert span.deviation > 0.1
        assert span.since_s == quarantined.last_good_s
        assert len([record for record in caplog.records if "QUARANTINED" in record.message]) == 1
        shutil.rmtree(folder)
        shutil.copytree(engine.model_dirs[1], folder)
        back = await service_when(memory_store, up_at(1))
        assert (await router.generate(ask("back"))).version_spans[0].version == 1
        (lifted,) = await memory_store.list_engine_quarantines()
    assert lifted.until_s == back.last_good_s
    assert lifted.raised_at == span.raised_at


async def test_tokens_between_the_last_right_canary_and_the_next_are_spoiled_and_no_others(
    engine: EngineTarget, memory_store: MemoryStore, tmp_path: Path
) -> None:
    """Weights go bad in the middle of a version, under the right path and label, and are healed by the reload."""
    folder = tmp_path / "v1"
    shutil.copytree(engine.model_dirs[0], folder)
    await memory_store.publish_policy(PolicyVersion(version=1, path=str(folder), canary=reference_of(engine, 0)))
    settings = CanarySettings(tolerance=1e-4, interval_s=0.7, timeout_s=5.0)
    async with registered(engine.base_url, memory_store, canary=settings), routed(memory_store) as router:
        await service_when(memory_store, up_at(1))
        before = use_of(await router.generate(ask("before")))
        await service_when(memory_store, lambda service: service.last_good_s > before.last_s)
        for index in (1, 0):  # the folder is right again when the registrar reloads it
            shutil.rmtree(folder)
            shutil.copytree(engine.model_dirs[index], folder)
            if index == 1:
                payload = {"model_path": str(folder), "weight_version": "1"}
                assert (await engine.call("POST", "/update_weights_from_disk", payload)).status == 200
                wrong = use_of(await router.generate(ask("wrong")))
        await service_when(memory_store, is_quarantined)
        await service_when(memory_store, up_at(1))
        after = use_of(await router.generate(ask("after")))
        quarantines = await memory_store.list_engine_quarantines()
    spoiled = [spoiled_by([use], quarantines) is not None for use in (before, wrong, after)]
    assert spoiled == [False, True, False]


def use_of(reply: GenerateReply) -> EngineUse:
    assert reply.engine_times is not None
    first_s, last_s = reply.engine_times
    return EngineUse(service_id=reply.service_id, first_s=first_s, last_s=last_s)


async def test_a_quarantine_outlives_its_registrar(
    engine: EngineTarget, memory_store: MemoryStore, tmp_path: Path
) -> None:
    wrong = PolicyVersion(version=1, path=str(engine.model_dirs[0]), canary=reference_of(engine, 1))
    await memory_store.publish_policy(wrong)
    async with registered(engine.base_url, memory_store):
        await service_when(memory_store, is_quarantined)
    assert is_quarantined((await memory_store.list_services())[0])
    right = PolicyVersion(version=2, path=str(engine.model_dirs[1]), canary=reference_of(engine, 1))
    await memory_store.publish_policy(right)
    async with registered(engine.base_url, memory_store):
        await service_when(memory_store, up_at(2))
    (span,) = await memory_store.list_engine_quarantines()
    assert span.until_s is not None


async def test_without_a_reference_the_service_far_from_the_median_of_three_is_quarantined(
    engine: EngineTarget, memory_store: MemoryStore, tmp_path: Path
) -> None:
    with embedded_target(tmp_path, kind="qwen3") as target:
        await target.update(1, "0")
        async with (
            registered(engine.base_url, memory_store, service_id="right-1"),
            registered(engine.base_url, memory_store, service_id="right-2"),
            registered(target.base_url, memory_store, service_id="wrong"),
        ):
            await service_when(memory_store, is_quarantined)
            services = await memory_store.list_services()
            assert {service.id for service in services if is_quarantined(service)} == {"wrong"}
            await service_when(memory_store, lambda s: s.id == "right-1" and s.last_good_s > 0)


async def test_with_two_services_and_no_reference_nobody_is_accused(
    engine: EngineTarget, memory_store: MemoryStore, tmp_path: Path
) -> None:
    with embedded_target(tmp_path, kind="qwen3") as target:
        await target.update(1, "0")
        async with (
            registered(engine.base_url, memory_store, service_id="one"),
            registered(target.base_url, memory_store, service_id="other"),
        ):
            for name in ("one", "other"):
                first = await service_when(memory_store, lambda s, name=name: s.id == name and up_at(0)(s))
                await service_when(memory_store, lambda s, first=first: s.id == first.id and s.canary != first.canary)
            services = await memory_store.list_services()
            assert [service.status for service in services] == [ServiceStatus.UP] * 2


# --- paused and hung ------------------------------------------------------------------------------------------------


async def test_an_engine_left_paused_with_nobody_loading_goes_on(
    engine: EngineTarget, memory_store: MemoryStore
) -> None:
    """A second registrar of the same engine died between pause and continue; the version is the newest already."""
    async with registered(engine.base_url, memory_store):
        await service_when(memory_store, up_at(0))
        await engine.call("POST", "/pause_generation", {"mode": "retract"})
        assert (await engine.generate([3, 4], max_new_tokens=2, timeout_s=WAIT_S)).status == 200
        await service_when(memory_store, up_at(0))


async def test_a_busy_engine_is_not_taken_for_a_hung_one(memory_store: MemoryStore, tmp_path: Path) -> None:
    """Canaries wait behind long generations for many times their timeout, and the service stays UP."""
    seen: set[ServiceStatus] = set()
    with embedded_target(tmp_path, kind="qwen3", max_running_requests=1) as target:
        async with registered(target.base_url, memory_store):
            await service_when(memory_store, up_at(0))
            generations = [
                asyncio.create_task(target.generate([3, index], max_new_tokens=400, ignore_eos=True))
                for index in range(2, 10)
            ]
            while not all(generation.done() for generation in generations):
                seen |= {service.status for service in await memory_store.list_services()}
                await asyncio.sleep(0.01)
    assert seen == {ServiceStatus.UP}


async def test_an_engine_whose_thread_hangs_behind_a_living_http_server_is_taken_out_and_comes_back(
    memory_store: MemoryStore, tmp_path: Path
) -> None:
    directory = tiny_lm.write_lm(tmp_path / "model")
    engine, tokenizer = build_engine(EngineSettings(model_path=directory, context_length=512, device="cpu"))
    listener = listen(InferenceConfig())
    gate = threading.Event()
    async with running_server(engine, tokenizer, listener):
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with registered(url, memory_store), routed(memory_store) as router:
            await service_when(memory_store, up_at(0))
            engine._call(lambda: gate.wait(WAIT_S))
            await service_when(memory_store, is_down)
            with pytest.raises(EngineError):
                await router.generate(ask("hung", deadline_s=0.5))
            gate.set()
            await service_when(memory_store, up_at(0))
            assert (await router.generate(ask("back"))).output_ids


async def test_a_server_that_accepts_and_never_answers_is_never_up_and_no_call_waits_for_ever(
    memory_store: MemoryStore,
) -> None:
    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(swallow, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with EngineClient(url, timeout_s=0.2) as client:
        calls = [
            client.model_info(),
            client.load(),
            client.pause(),
            client.continue_generation(),
            client.update_weights_from_disk("v1", version="1"),
        ]
        started = time.monotonic()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(outcome, EngineError) for outcome in outcomes)
        assert time.monotonic() - started < 5
    async with registered(url, memory_store):
        service = await service_when(memory_store, lambda service: True)
        assert is_down(service)
    server.close()


# --- processes ------------------------------------------------------------------------------------------------------


async def test_a_frozen_engine_is_replaced_within_a_bound_and_returns_only_with_the_current_weights(
    engine: EngineTarget, memory_store: MemoryStore
) -> None:
    """SIGSTOP, a new version meanwhile, SIGCONT; then a kill, and a restart with the weights of the start."""
    start, newer = engine.model_dirs
    with engine_processes(start, count=1) as (first,):
        async with (
            registered(first.base_url, memory_store, service_id="first"),
            registered(engine.base_url, memory_store, service_id="second"),
            routed(memory_store) as router,
        ):
            await service_when(memory_store, lambda s: s.id == "first" and up_at(0)(s))
            await service_when(memory_store, lambda s: s.id == "second" and up_at(0)(s))
            first.send(signal.SIGSTOP)
            stopped_at = time.monotonic()
            replies = await asyncio.gather(*(router.generate(ask(f"frozen-{index}")) for index in range(8)))
            assert {reply.service_id for reply in replies} >= {"second"}
            assert time.monotonic() - stopped_at < 8  # a request there waits for the heartbeat to lapse, no longer
            await memory_store.publish_policy(PolicyVersion(version=1, path=str(newer)))
            await service_when(memory_store, lambda s: s.id == "second" and up_at(1)(s))
            first.send(signal.SIGCONT)
            await service_when(memory_store, lambda s: s.id == "first" and up_at(1)(s))
            await assert_only_version(router, 1, rid="thawed")
            first.send(signal.SIGKILL)
            await service_when(memory_store, lambda s: s.id == "first" and is_down(s))
            await asyncio.to_thread(first.restart)
            asking = asyncio.create_task(assert_only_version(router, 1, rid="restarted", num_requests=60))
            await service_when(memory_store, lambda s: s.id == "first" and up_at(1)(s))
            await asking


async def assert_only_version(router: RoutedClient, version: int, *, rid: str, num_requests: int = 10) -> None:
    for index in range(num_requests):
        reply = await router.generate(ask(f"{rid}-{index}"))
        assert {span.version for span in reply.version_spans} == {version}
