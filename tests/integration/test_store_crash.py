"""kill -9 of the database under load, and of the belief of a sampler that its lease still holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from agentrl.errors import StaleClaimError, StoreError
from agentrl.store import MongoStore, open_store
from agentrl.types import Record, RecordStatus, StopReason, TaskClaim
from crashing_server import CrashingServer
from factories import make_task, make_turn

NUM_WRITERS = 24
NUM_CRASHES = 3
TURNS_BETWEEN_CRASHES = 60
DEADLINE_S = 100.0


@asynccontextmanager
async def opened(crashing: CrashingServer, *, timeout_s: float = 60.0) -> AsyncIterator[MongoStore]:
    store = open_store(crashing.server.uri, database="run", timeout_s=timeout_s)
    await store.prepare()
    try:
        yield store
    finally:
        await store.close()


async def claim_group(store: MongoStore, *, num_generations: int, lease_s: float = 3600.0) -> TaskClaim:
    await store.insert_tasks([make_task(num_generations=num_generations)])
    (claim,) = await store.claim_tasks(split="train", owner="worker", lease_s=lease_s, limit=1)
    return claim


def numbered_turn(record: Record) -> tuple[tuple[int, ...], int]:
    """Tokens that say which Record and turn they belong to."""
    return (record.generation, len(record.turn_ids)), 1 + len(record.turn_ids) % 2


class Writers:
    """Rollouts that only commit turns; what was acknowledged is in `acknowledged`."""

    def __init__(self, store: MongoStore, records: list[Record]) -> None:
        self.store = store
        self.acknowledged = {record.id: record for record in records}
        self.num_committed = 0
        self.progress = asyncio.Condition()
        self.stopped = False

    async def write(self, record: Record) -> None:
        while not self.stopped:
            completion_ids, num_tools = numbered_turn(record)
            turn = make_turn(record, completion_ids=completion_ids, tool_results=("result",) * num_tools)
            record = await self.store.commit_turn(record, turn)
            self.acknowledged[record.id] = record
            async with self.progress:
                self.num_committed += 1
                self.progress.notify_all()

    async def wait_for(self, num_more: int) -> None:
        target = self.num_committed + num_more
        async with self.progress:
            await self.progress.wait_for(lambda: self.num_committed >= target)


async def assert_consistent(store: MongoStore, acknowledged: dict[str, Record]) -> None:
    """Every acknowledged turn is in its header, in order, and everything a header names can be read."""
    for record_id, remembered in acknowledged.items():
        stored = await store.get_record(record_id)
        assert stored is not None
        assert stored.turn_ids[: len(remembered.turn_ids)] == remembered.turn_ids
        assert len(stored.turn_ids) <= len(remembered.turn_ids) + 1, "at most the turn whose reply was lost"
        turns = await store.load_turns(stored)
        assert [turn.tokens.completion_ids for turn in turns] == [
            (stored.generation, index) for index in range(len(turns))
        ]
        assert [len(turn.tools) for turn in turns] == [1 + index % 2 for index in range(len(turns))]
        assert stored.num_tool_calls == sum(len(turn.tools) for turn in turns)
        assert stored.num_completion_tokens == 2 * len(turns)


async def test_rollouts_outlive_a_database_that_is_killed_and_restarted(crashing: CrashingServer) -> None:
    async with asyncio.timeout(DEADLINE_S), opened(crashing) as store:
        claim = await claim_group(store, num_generations=NUM_WRITERS)
        writers = Writers(store, await store.open_records(claim))
        async with asyncio.TaskGroup() as group:
            for record in list(writers.acknowledged.values()):
                group.create_task(writers.write(record))
            for _ in range(NUM_CRASHES):
                await writers.wait_for(TURNS_BETWEEN_CRASHES)
                await crashing.crash_and_restart()
            await writers.wait_for(TURNS_BETWEEN_CRASHES)
            writers.stopped = True
        for record_id, remembered in writers.acknowledged.items():
            assert await store.get_record(record_id) == remembered
        await assert_consistent(store, writers.acknowledged)
        assert await store.renew_claims([claim], lease_s=60) == [], "the claim survived"


async def test_nothing_acknowledged_is_lost_when_database_and_rollouts_die_together(crashing: CrashingServer) -> None:
    async with asyncio.timeout(DEADLINE_S):
        async with opened(crashing) as store:
            claim = await claim_group(store, num_generations=NUM_WRITERS)
            records = await store.open_records(claim)
        for _ in range(NUM_CRASHES):
            async with opened(crashing, timeout_s=60) as store:
                writers = Writers(store, records)
                tasks = [asyncio.create_task(writers.write(record)) for record in records]
                await writers.wait_for(TURNS_BETWEEN_CRASHES)
                crashing.server.kill()
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                await asyncio.to_thread(crashing.start)
            async with opened(crashing) as store:
                await assert_consistent(store, writers.acknowledged)
                records = await store.open_records(claim)


async def test_claims_survive_a_crash_and_no_task_is_handed_out_twice(crashing: CrashingServer) -> None:
    num_tasks = 120
    async with asyncio.timeout(DEADLINE_S), opened(crashing) as first, opened(crashing) as second:
        await first.insert_tasks([make_task(str(k), epoch=k % 2) for k in range(num_tasks)])
        claims: list[TaskClaim] = []
        started = asyncio.Event()

        async def drain(store: MongoStore, owner: str) -> None:
            while taken := await store.claim_tasks(split="train", owner=owner, lease_s=3600, limit=2):
                claims.extend(taken)
                started.set()

        async with asyncio.TaskGroup() as group:
            for worker in range(4):
                group.create_task(drain(first, f"first-{worker}"))
                group.create_task(drain(second, f"second-{worker}"))
            await started.wait()
            await crashing.crash_and_restart()
        assert len({claim.task.id for claim in claims}) == len(claims) == num_tasks
        assert {claim.fence for claim in claims} == {1}
        assert await first.renew_claims(claims, lease_s=60) == []


async def test_a_zombie_is_refused_from_the_moment_its_successor_opens_the_records(crashing: CrashingServer) -> None:
    async with asyncio.timeout(DEADLINE_S), opened(crashing) as zombie_store, opened(crashing) as store:
        old = await claim_group(zombie_store, num_generations=NUM_WRITERS, lease_s=-1)
        zombies = Writers(zombie_store, await zombie_store.open_records(old))
        tasks = [asyncio.create_task(zombies.write(record)) for record in list(zombies.acknowledged.values())]
        await zombies.wait_for(TURNS_BETWEEN_CRASHES)

        assert await store.reap_expired_claims(split="train") == [old.task.id]
        (new,) = await store.claim_tasks(split="train", owner="successor", lease_s=3600, limit=1)
        reopened = await store.open_records(new)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)

        assert [type(outcome) for outcome in outcomes] == [StaleClaimError] * NUM_WRITERS
        for record in reopened:
            assert record.fence == new.fence
            assert record.turn_ids == zombies.acknowledged[record.id].turn_ids
            extended = await store.commit_turn(record, make_turn(record))
            final = replace(extended, status=RecordStatus.FINISHED, stop_reason=StopReason.ANSWER, score=1.0)
            with pytest.raises(StaleClaimError):
                await zombie_store.finish_record(replace(final, fence=old.fence))
            await store.finish_record(final)
            assert [turn.model.id for turn in await store.load_turns(extended)] == list(extended.turn_ids)


async def test_a_database_that_stays_away_ends_the_wait_with_an_error(crashing: CrashingServer) -> None:
    async with asyncio.timeout(DEADLINE_S), opened(crashing, timeout_s=1.0) as store:
        claim = await claim_group(store, num_generations=3)
        records = await store.open_records(claim)
        crashing.server.kill()
        outcomes = await asyncio.gather(
            *(store.commit_turn(record, make_turn(record)) for record in records), return_exceptions=True
        )
        assert all(isinstance(outcome, StoreError) for outcome in outcomes)
        await asyncio.to_thread(crashing.start)
        extended = await store.commit_turn(records[0], make_turn(records[0]))
        assert await store.get_record(records[0].id) == extended
