"""The lists of services and workers do not grow with every restart."""

from datetime import UTC, datetime, timedelta

import pytest

from agentrl.store import MemoryStore, MongoStore
from agentrl.store.fleet import KEPT_SILENT
from agentrl.store.indexes import SERVICE, WORKER
from agentrl.types import InferenceService, ServiceStatus, Worker


def service(number: int) -> InferenceService:
    return InferenceService(id=f"e{number:03}", base_url="http://e", status=ServiceStatus.UP, policy_version=0)


def worker(number: int) -> Worker:
    return Worker(id=f"w{number:03}", kind="sampler", host="h", pid=number)


async def register(store: MemoryStore | MongoStore, number: int) -> None:
    await store.put_service(service(number))
    await store.put_worker(worker(number))


async def ids(store: MemoryStore | MongoStore) -> tuple[list[str], list[str]]:
    return [found.id for found in await store.list_services()], [found.id for found in await store.list_workers()]


def expected(*numbers: int) -> tuple[list[str], list[str]]:
    return [f"e{number:03}" for number in numbers], [f"w{number:03}" for number in numbers]


async def test_a_newcomer_removes_all_but_the_last_of_the_entries_that_are_silent_for_long(mongo_store: MongoStore):
    for number in range(40):
        await register(mongo_store, number)
    now = await mongo_store.server_time()
    for name, prefix in ((SERVICE, "e"), (WORKER, "w")):
        collection = mongo_store._database.durable(name)
        for number in range(38):  # the last two live
            heartbeat_at = now - timedelta(hours=2, minutes=-number)
            await collection.update_one({"_id": f"{prefix}{number:03}"}, {"$set": {"heartbeat_at": heartbeat_at}})
    await register(mongo_store, 39)
    assert await ids(mongo_store) == expected(*range(40)), "a heartbeat removes nothing"
    await register(mongo_store, 40)
    assert await ids(mongo_store) == expected(*range(38 - KEPT_SILENT, 41))


async def test_the_store_in_memory_forgets_alike():
    now = datetime(2026, 1, 1, tzinfo=UTC)
    store = MemoryStore(clock=lambda: now)
    for number in range(40):
        await register(store, number)
        now += timedelta(minutes=1)
    now += timedelta(minutes=58)  # the last two are silent for less than an hour
    await register(store, 40)
    assert await ids(store) == expected(*range(38 - KEPT_SILENT, 41))


@pytest.mark.parametrize("silent", [0, KEPT_SILENT])
async def test_a_bounded_history_is_kept_for_ever(silent: int):
    now = datetime(2026, 1, 1, tzinfo=UTC)
    store = MemoryStore(clock=lambda: now)
    for number in range(silent):
        await register(store, number)
    now += timedelta(days=300)
    await register(store, silent)
    assert await ids(store) == expected(*range(silent + 1))
