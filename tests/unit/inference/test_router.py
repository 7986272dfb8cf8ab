from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from agentrl.errors import EngineError, EngineErrorKind
from agentrl.inference import RoutedClient
from agentrl.store import MemoryStore
from agentrl.types import GenerateRequest, InferenceService, SamplingParams, ServiceStatus


class FakeService:
    """An HTTP service that answers /generate as told and remembers what it was asked."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.answer: Callable[[dict[str, Any]], tuple[int, Any]] = lambda body: (200, reply_to(body))
        self.hold = asyncio.Event()
        self.hold.set()
        self.arrived = asyncio.Event()
        self.base_url = ""

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        self.arrived.set()
        await self.hold.wait()
        status, answer = self.answer(body)
        return web.Response(status=status, text=json.dumps(answer))

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        return web.Response()


def reply_to(body: dict[str, Any], *, version: str = "3", finish: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "output_ids": [4, 5],
        "meta_info": {
            "finish_reason": finish or {"type": "length", "length": 2},
            "prompt_tokens": len(body["input_ids"]),
            "output_token_logprobs": [[-0.5, 4, None], [-0.25, 5, None]],
            "weight_versions": [{"version": version, "start": 0, "end": 2}],
        },
    }


@asynccontextmanager
async def running(service: FakeService) -> AsyncIterator[FakeService]:
    app = web.Application()
    app.add_routes([web.post("/generate", service.generate), web.post("/abort_request", service.abort)])
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    service.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield service
    await runner.cleanup()


@pytest.fixture
async def services() -> AsyncIterator[list[FakeService]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(running(FakeService())) for _ in range(2)]


@pytest.fixture
async def fleet(memory_store: MemoryStore, services: list[FakeService]) -> MemoryStore:
    for index, service in enumerate(services):
        await announce(memory_store, f"s{index}", service)
    return memory_store


async def announce(
    fleet: MemoryStore,
    service_id: str,
    service: FakeService,
    *,
    status: ServiceStatus = ServiceStatus.UP,
    num_running: int = 0,
) -> None:
    await fleet.put_service(
        InferenceService(
            id=service_id, base_url=service.base_url, status=status, policy_version=3, num_running=num_running
        )
    )


@pytest.fixture
async def router(fleet: MemoryStore) -> AsyncIterator[RoutedClient]:
    client = RoutedClient(fleet, vocab_size=100, refresh_s=0.05)
    yield client
    await client.close()


def ask(rid: str = "r1", *, session: str = "", deadline_s: float = 10.0) -> GenerateRequest:
    return GenerateRequest(
        rid=rid, input_ids=[1, 2, 3], params=SamplingParams(max_new_tokens=2), deadline_s=deadline_s, session=session
    )


async def test_requests_of_a_session_stick_to_one_service(router: RoutedClient, services: list[FakeService]) -> None:
    for turn in range(6):
        await router.generate(ask(f"r{turn}", session="record-1"))
    assert sorted(len(service.bodies) for service in services) == [0, 6]


async def test_new_sessions_go_to_the_least_loaded_service(
    router: RoutedClient, fleet: MemoryStore, services: list[FakeService]
) -> None:
    await announce(fleet, "s0", services[0], num_running=50)
    for turn in range(4):
        await router.generate(ask(f"r{turn}", session=f"record-{turn}"))
    assert [len(service.bodies) for service in services] == [0, 4]


async def test_concurrent_sessions_spread_evenly(router: RoutedClient, services: list[FakeService]) -> None:
    for service in services:
        service.hold.clear()
    tasks = [asyncio.create_task(router.generate(ask(f"r{turn}", session=f"record-{turn}"))) for turn in range(10)]
    async with asyncio.timeout(5):
        while sum(len(service.bodies) for service in services) < 10:
            await asyncio.sleep(0.01)
    assert [len(service.bodies) for service in services] == [5, 5]
    for service in services:
        service.hold.set()
    await asyncio.gather(*tasks)


async def test_every_sampling_parameter_is_sent_explicitly(router: RoutedClient, services: list[FakeService]) -> None:
    await router.generate(ask())
    body = (services[0].bodies + services[1].bodies)[0]
    assert body["return_logprob"] is True
    assert body["logprob_start_len"] == -1
    assert body["sampling_params"] == {
        "max_new_tokens": 2,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": [],
        "skip_special_tokens": False,
        "n": 1,
    }


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (503, {"error": {"message": "The request queue is full."}}),
        (500, {"detail": "KV cache out of memory"}),
        (429, {"error": "slow down"}),
    ],
)
async def test_failures_that_may_pass_are_retried_elsewhere(
    router: RoutedClient, services: list[FakeService], status: int, answer: Any
) -> None:
    services[0].answer = lambda body: (status, answer)
    replies = [await router.generate(ask(f"r{index}", session=f"s{index}")) for index in range(4)]
    assert {reply.service_id for reply in replies} == {"s1"}


async def test_an_unreachable_service_is_not_tried_again_before_its_next_heartbeat(
    router: RoutedClient, fleet: MemoryStore, services: list[FakeService], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.inference.router._SUSPEND_S", 0.0)
    num_tries = 0

    async def drop(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_tries
        num_tries += 1
        writer.close()

    async with await asyncio.start_server(drop, "127.0.0.1", 0) as dead:
        dying = FakeService()
        dying.base_url = f"http://127.0.0.1:{dead.sockets[0].getsockname()[1]}"
        for index, service in enumerate(services):
            await announce(fleet, f"s{index}", service, num_running=50)
        await announce(fleet, "dying", dying)
        for turn in range(4):
            await router.generate(ask(f"r{turn}", session="record-1"))
        assert num_tries == 1
        await announce(fleet, "dying", dying)
        async with asyncio.timeout(5):
            while num_tries == 1:
                await router.generate(ask())


async def test_each_attempt_has_its_own_id(router: RoutedClient, services: list[FakeService]) -> None:
    answers = iter([(503, {}), (503, {})])
    for service in services:
        service.answer = lambda body: next(answers, (200, reply_to(body)))
    await router.generate(ask("rid-7"))
    rids = [body["rid"] for service in services for body in service.bodies]
    assert len(rids) == len(set(rids)) == 3
    assert all(rid.startswith("rid-7-a") for rid in rids)


async def test_aborted_generations_are_tried_again_and_never_returned(
    router: RoutedClient, services: list[FakeService]
) -> None:
    abort = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    answers = iter([abort, abort])
    for service in services:
        service.answer = lambda body: (200, reply_to(body, finish=next(answers, None)))
    reply = await router.generate(ask())
    assert reply.finish_reason == "length"
    assert sum(len(service.bodies) for service in services) == 3


async def test_a_refused_request_is_not_retried(router: RoutedClient, services: list[FakeService]) -> None:
    for service in services:
        service.answer = lambda body: (400, {"error": {"message": "prompt too long"}})
    with pytest.raises(EngineError, match="prompt too long") as caught:
        await router.generate(ask())
    assert caught.value.kind is EngineErrorKind.REJECTED
    assert sum(len(service.bodies) for service in services) == 1


async def test_a_nan_sample_is_not_retried(router: RoutedClient, services: list[FakeService]) -> None:
    for service in services:
        service.answer = lambda body: (200, reply_to(body, finish={"type": "stop", "matched": "NaN happened"}))
    with pytest.raises(EngineError) as caught:
        await router.generate(ask())
    assert caught.value.kind is EngineErrorKind.INVALID_SAMPLE


async def test_a_service_without_a_registrar_is_not_sampled_from(
    router: RoutedClient, services: list[FakeService]
) -> None:
    services[0].answer = lambda body: (200, reply_to(body, version="default"))
    replies = [await router.generate(ask(f"r{index}", session=f"s{index}")) for index in range(4)]
    assert {reply.service_id for reply in replies} == {"s1"}


async def test_waits_for_a_service_to_come_up(memory_store: MemoryStore) -> None:
    async with running(FakeService()) as service:
        client = RoutedClient(memory_store, vocab_size=100)
        pending = asyncio.create_task(client.generate(ask()))
        done, _ = await asyncio.wait([pending], timeout=0.2)
        assert not done
        await announce(memory_store, "late", service)
        assert (await pending).service_id == "late"
        await client.close()


async def test_gives_up_at_the_deadline_when_nothing_is_up(memory_store: MemoryStore) -> None:
    client = RoutedClient(memory_store)
    with pytest.raises(EngineError, match="no inference service") as caught:
        await client.generate(ask(deadline_s=0.2))
    assert caught.value.kind is EngineErrorKind.TIMEOUT
    await client.close()


async def test_services_that_are_down_or_silent_are_not_used(fleet: MemoryStore, services: list[FakeService]) -> None:
    await announce(fleet, "s0", services[0], status=ServiceStatus.DOWN)
    silent = RoutedClient(fleet, vocab_size=100, heartbeat_timeout_s=0.0)
    with pytest.raises(EngineError, match="no inference service"):
        await silent.generate(ask(deadline_s=0.2))
    await silent.close()
    client = RoutedClient(fleet, vocab_size=100)
    assert {(await client.generate(ask(f"r{index}"))).service_id for index in range(4)} == {"s1"}
    await client.close()


@pytest.mark.parametrize("status", [ServiceStatus.DOWN, ServiceStatus.QUARANTINED])
async def test_a_generation_moves_on_when_its_service_goes_down_or_into_quarantine(
    router: RoutedClient, fleet: MemoryStore, services: list[FakeService], status: ServiceStatus
) -> None:
    await announce(fleet, "s1", services[1], status=ServiceStatus.DOWN)
    services[0].hold.clear()
    pending = asyncio.create_task(router.generate(ask("mover")))
    await services[0].arrived.wait()
    await announce(fleet, "s1", services[1])
    await announce(fleet, "s0", services[0], status=status)
    assert (await pending).service_id == "s1"


async def test_a_quarantined_service_is_never_asked(
    router: RoutedClient, fleet: MemoryStore, services: list[FakeService]
) -> None:
    await announce(fleet, "s0", services[0], status=ServiceStatus.QUARANTINED)
    for turn in range(6):
        await router.generate(ask(f"r{turn}", session=f"record-{turn}"))
    assert [len(service.bodies) for service in services] == [0, 6]


async def test_a_service_that_comes_back_at_another_address_is_asked_there(
    router: RoutedClient, fleet: MemoryStore, services: list[FakeService]
) -> None:
    await announce(fleet, "s1", services[1], status=ServiceStatus.DOWN)
    await router.generate(ask("before", session="record"))
    await announce(fleet, "s0", services[1])
    async with asyncio.timeout(5):
        while not services[1].bodies:
            await router.generate(ask("after", session="record"))
            await asyncio.sleep(0.01)


async def test_a_timeout_and_a_cancellation_abort_on_the_server(
    router: RoutedClient, services: list[FakeService]
) -> None:
    for service in services:
        service.hold.clear()
    with pytest.raises(EngineError) as caught:
        await router.generate(ask("slow", deadline_s=0.3))
    assert caught.value.kind is EngineErrorKind.TIMEOUT
    pending = asyncio.create_task(router.generate(ask("gone")))
    arrived = [asyncio.create_task(service.arrived.wait()) for service in services]
    await asyncio.wait(arrived, return_when=asyncio.FIRST_COMPLETED)
    async with asyncio.timeout(5):
        while not any(body["rid"].startswith("gone") for service in services for body in service.bodies):
            await asyncio.sleep(0.01)
    pending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pending
    await router.close()
    aborted = services[0].aborted + services[1].aborted
    assert sorted(rid.rsplit("-", 1)[0] for rid in aborted) == ["gone", "slow"]
    for task in arrived:
        task.cancel()


async def test_a_draining_service_finishes_its_sessions_and_gets_no_new_ones(
    router: RoutedClient, fleet: MemoryStore, services: list[FakeService]
) -> None:
    first = await router.generate(ask("r1", session="old"))
    index = int(first.service_id[1:])
    await announce(fleet, first.service_id, services[index], status=ServiceStatus.DRAINING)
    await asyncio.sleep(0.1)  # the listing is read again
    assert (await router.generate(ask("r2", session="old"))).service_id == first.service_id
    other = f"s{1 - index}"
    assert {(await router.generate(ask(f"n{number}", session=f"new{number}"))).service_id for number in range(4)} == {
        other
    }
    await announce(fleet, other, services[1 - index], status=ServiceStatus.DOWN)
    await asyncio.sleep(0.1)
    with pytest.raises(EngineError):
        await router.generate(ask("r3", session="another", deadline_s=0.3))
