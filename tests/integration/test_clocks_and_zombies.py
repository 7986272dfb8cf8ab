"""Sampler processes whose wall clock is hours off, and one that was stopped and comes back as a zombie."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

import sampler_process
from agentrl.protocols import TaskState
from agentrl.store import MongoStore
from agentrl.types import InferenceService, RecordStatus, ServiceStatus, StopReason, TaskStatus
from factories import make_settlement, make_task, make_turn
from tiny_chat import write_tiny_chat

HOURS_OFF_S = 5 * 3600.0
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat(tmp_path_factory.mktemp("chat"))


@pytest.fixture
async def served_store(mongo_store: MongoStore) -> MongoStore:
    """A store that says a service is up."""
    await mongo_store.put_service(
        InferenceService(id="s", base_url="http://s", status=ServiceStatus.UP, policy_version=0)
    )
    return mongo_store


@contextmanager
def sampler(
    folder: Path,
    *,
    name: str,
    uri: str,
    database: str,
    model_dir: Path,
    lease_s: float,
    renews: bool = True,
    skew_s: float = 0.0,
) -> Iterator[subprocess.Popen[bytes]]:
    """A running sampler process; `folder/release` lets its engine answer."""
    spec = {
        "uri": uri, "database": database, "model_dir": str(model_dir), "release_file": str(folder / "release"),
        "skew_s": skew_s, "lease_s": lease_s, "renews": renews,
    }  # fmt: skip
    path = folder / f"{name}.json"
    path.write_text(json.dumps(spec))
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, sampler_process.__file__, str(path)], stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Poll with a bound."""
    async with asyncio.timeout(DEADLINE_S):
        while not await condition():
            await asyncio.sleep(0.02)


async def states(store: MongoStore) -> list[TaskState]:
    return await store.find_tasks(await store.list_task_ids())


async def num_records_with_a_turn(store: MongoStore) -> int:
    return sum(bool(record.turn_ids) for record in await store.list_records(split="train"))


async def num_settled(store: MongoStore) -> int:
    return (await store.count_tasks(split="train")).get(TaskStatus.SETTLED, 0)


async def test_workers_whose_clocks_are_hours_off_neither_lose_leases_nor_steal_them(
    served_store: MongoStore, mongo_uri: str, database_name: str, model_dir: Path, tmp_path: Path
) -> None:
    store, lease_s = served_store, 2.0
    await store.insert_tasks([make_task(f"q{k}", num_generations=1, answer="5") for k in range(3)])
    (honest,) = await store.claim_tasks(split="train", owner="honest", lease_s=120.0, limit=1)
    with ExitStack() as stack:
        for name, skew_s in (("ahead", HOURS_OFF_S), ("behind", -HOURS_OFF_S)):
            running = sampler(
                tmp_path, name=name, uri=mongo_uri, database=database_name, model_dir=model_dir,
                lease_s=lease_s, skew_s=skew_s,
            )  # fmt: skip
            stack.enter_context(running)

        async def both_work() -> bool:
            return await num_records_with_a_turn(store) == 2

        await until(both_work)
        began = await store.server_time()

        async def two_leases_are_over() -> bool:
            """Meanwhile nobody loses anything."""
            assert await store.reap_expired_claims(split="train") == []
            for state in await states(store):
                assert (state.status, state.fence) == (TaskStatus.RUNNING, 1)
                assert state.lease_until is not None
                left = state.lease_until - await store.server_time()
                assert timedelta(0) < left <= timedelta(seconds=120.0)
            return await store.server_time() - began > timedelta(seconds=2 * lease_s)

        await until(two_leases_are_over)
        assert await store.renew_claims([honest], lease_s=120.0) == []
        (tmp_path / "release").touch()

        async def both_settled() -> bool:
            return await num_settled(store) == 2

        await until(both_settled)
    assert {state.fence for state in await states(store)} == {1}
    workers = await store.list_workers()
    now = await store.server_time()
    assert all(
        worker.heartbeat_at is not None and abs(now - worker.heartbeat_at) < timedelta(minutes=2) for worker in workers
    )


async def test_a_sampler_that_was_stopped_and_continued_is_refused_and_works_on_something_else(
    served_store: MongoStore, mongo_uri: str, database_name: str, model_dir: Path, tmp_path: Path
) -> None:
    store = served_store
    await store.insert_tasks([make_task("q0", num_generations=1, answer="5")])
    # It renews nothing, so only the fence can tell it that its claim is lost.
    running = sampler(
        tmp_path, name="zombie", uri=mongo_uri, database=database_name, model_dir=model_dir,
        lease_s=4.0, renews=False,
    )  # fmt: skip
    with running as zombie:

        async def it_works() -> bool:
            return await num_records_with_a_turn(store) == 1

        await until(it_works)
        os.kill(zombie.pid, signal.SIGSTOP)
        (old,) = await store.list_records(split="train")

        async def its_lease_is_over() -> bool:
            return await store.reap_expired_claims(split="train") == [old.task_id]

        await until(its_lease_is_over)
        (claim,) = await store.claim_tasks(split="train", owner="successor", lease_s=120.0, limit=1)
        (record,) = await store.open_records(claim)
        assert (record.turn_ids, record.fence) == (old.turn_ids, old.fence + 1)
        record = await store.commit_turn(record, make_turn(record, text="<answer>5</answer>"))
        final = replace(record, status=RecordStatus.FINISHED, stop_reason=StopReason.ANSWER, score=1.0, scorer="em")
        await store.finish_record(final)
        await store.settle_task(claim, make_settlement(claim.task, rewards=(1.0,)), [])

        (tmp_path / "release").touch()
        os.kill(zombie.pid, signal.SIGCONT)

        async def it_is_refused() -> bool:
            return bool(await store.list_quarantined())

        await until(it_is_refused)
        (late,) = await store.list_quarantined()
        assert late.key.startswith(f"turn {old.id}/001.{old.fence}")
        assert "fence 1 is old" in late.reason
        stored = await store.get_record(old.id)
        assert stored is not None
        assert (stored.turn_ids, stored.score, stored.fence) == (record.turn_ids, 1.0, record.fence)

        await store.insert_tasks([make_task("q1", num_generations=1, answer="5")])

        async def it_settled_another_task() -> bool:
            return await num_settled(store) == 2

        await until(it_settled_another_task)
        assert zombie.poll() is None
