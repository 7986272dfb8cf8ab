import asyncio
from dataclasses import replace

import pytest

from agentrl.cli.chaos.redelivery import AcceptedError, deliver_late, repeat_turn
from agentrl.protocols import Store
from agentrl.store import MemoryStore
from agentrl.types import Record, RecordStatus, StopReason, TaskClaim, Turn
from factories import make_task, make_turn


async def finish_one_record(store: Store) -> Record:
    await store.insert_tasks([make_task()])
    [claim] = await store.claim_tasks(split="train", owner="w", lease_s=60, limit=1)
    record = (await store.open_records(claim))[0]
    for _ in range(2):
        record = await store.commit_turn(record, make_turn(record, tool_results=["2"]))
    finished = replace(record, status=RecordStatus.FINISHED, stop_reason=StopReason.ANSWER, answer="2", score=1.0)
    await store.finish_record(finished)
    return finished


async def take_over(store: Store) -> TaskClaim:
    """Another worker: reaps the silent claim, claims the Task and opens its Records."""
    async with asyncio.timeout(10):
        while not await store.reap_expired_claims(split="train"):
            await asyncio.sleep(0.05)
    [claim] = await store.claim_tasks(split="train", owner="other", lease_s=60, limit=1)
    await store.open_records(claim)
    return claim


async def test_a_turn_delivered_twice_is_taken_once(store):
    record = await finish_one_record(store)
    assert await repeat_turn(store) == f"{record.id}: taken as the delivery it repeats"
    after = await store.get_record(record.id)
    assert after is not None
    assert after.turn_ids == record.turn_ids
    assert len(await store.load_turns(after)) == 2


async def test_without_a_finished_record_there_is_nothing_to_repeat(store):
    assert await repeat_turn(store) == "no finished record yet"


async def test_the_work_of_a_lost_claim_is_refused(store):
    await store.insert_tasks([make_task()])
    late = asyncio.create_task(deliver_late(store))
    claim = await take_over(store)
    async with asyncio.timeout(10):
        assert await late == f"{claim.task.id}: late turn and settlement at fence 1 refused"
    assert await store.get_settlement(claim.task.id) is None
    assert all(record.turn_ids == () for record in await store.list_records(task_id=claim.task.id))


async def test_a_store_that_takes_late_work_is_found_out():
    class Careless(MemoryStore):
        async def commit_turn(self, record: Record, turn: Turn) -> Record:
            return record

    store = Careless()
    await store.insert_tasks([make_task()])
    late = asyncio.create_task(deliver_late(store))
    await take_over(store)
    with pytest.raises(AcceptedError, match="turn of train:0:q1/g0 was accepted under a lost claim"):
        async with asyncio.timeout(10):
            await late


async def test_a_store_that_takes_a_turn_twice_is_found_out():
    class Forgetful(MemoryStore):
        async def commit_turn(self, record: Record, turn: Turn) -> Record:
            self.extra = turn.model.id
            return await super().commit_turn(record, turn)

        async def get_record(self, record_id: str) -> Record | None:
            record = await super().get_record(record_id)
            return record and replace(record, turn_ids=(*record.turn_ids, self.extra))

    store = Forgetful()
    record = await finish_one_record(store)
    with pytest.raises(AcceptedError, match=rf"turn {record.turn_ids[-1]} delivered twice changed"):
        await repeat_turn(store)
