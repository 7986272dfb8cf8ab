"""Late work is logged where people can find it, and batches keep their members apart."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from agentrl.errors import StaleClaimError, StoreError
from agentrl.store.indexes import DISPATCH, QUARANTINE, TASK
from agentrl.store.mongo import MongoStore
from agentrl.types import SCHEMA_VERSION, Record, RecordStatus, StopReason, TaskClaim
from factories import make_sequence, make_settlement, make_task, make_turn


async def zombie_and_owner(store: MongoStore, *, num_generations: int = 2) -> tuple[TaskClaim, TaskClaim]:
    await store.insert_tasks([make_task(num_generations=num_generations)])
    (old,) = await store.claim_tasks(split="train", owner="zombie", lease_s=-1, limit=1)
    await store.open_records(old)
    await store.reap_expired_claims(split="train")
    (new,) = await store.claim_tasks(split="train", owner="owner", lease_s=60, limit=1)
    return old, new


async def test_late_turns_results_and_settlements_are_quarantined_once_with_a_reason(mongo_store: MongoStore) -> None:
    old, new = await zombie_and_owner(mongo_store)
    late = Record(
        id=f"{old.task.id}/g0",
        task_id=old.task.id,
        split="train",
        generation=0,
        fence=old.fence,
        status=RecordStatus.RUNNING,
    )
    await mongo_store.open_records(new)
    turn = make_turn(late, tool_results=("3",))
    final = replace(late, status=RecordStatus.FAILED, stop_reason=StopReason.TIMEOUT)
    for _ in range(2):
        with pytest.raises(StaleClaimError):
            await mongo_store.commit_turn(late, turn)
        with pytest.raises(StaleClaimError):
            await mongo_store.finish_record(final)
        with pytest.raises(StaleClaimError):
            await mongo_store.settle_task(old, make_settlement(old.task), [make_sequence(late)])
    database = mongo_store._database
    logged = await database.durable(QUARANTINE).find({}).to_list()
    assert len(logged) == 3
    assert all("another worker took the task over" in entry["reason"] for entry in logged)
    (late_turn,) = [entry for entry in logged if "dispatch_ids" in entry]
    assert late_turn["dispatch_ids"] == [turn.model.id, turn.tools[0].id]
    kept = await database.durable(DISPATCH).find({"turn_id": turn.model.id}).to_list()
    assert len(kept) == 2, "what was sampled is never deleted"


async def test_one_record_that_cannot_be_written_fails_alone(mongo_store: MongoStore) -> None:
    await mongo_store.insert_tasks([make_task(num_generations=8)])
    (claim,) = await mongo_store.claim_tasks(split="train", owner="w", lease_s=60, limit=1)
    first, *others = await mongo_store.open_records(claim)
    await mongo_store.commit_turn(first, make_turn(first))
    again = make_turn(first, completion_ids=(9, 9, 9))
    outcomes = await asyncio.gather(
        mongo_store.commit_turn(first, again),
        *(mongo_store.commit_turn(record, make_turn(record)) for record in others),
        return_exceptions=True,
    )
    assert isinstance(outcomes[0], StoreError)
    assert all(isinstance(outcome, Record) for outcome in outcomes[1:])


async def test_the_number_of_attempts_is_recorded(mongo_store: MongoStore) -> None:
    old, _ = await zombie_and_owner(mongo_store)
    document = await mongo_store._database.durable(TASK).find_one({"_id": old.task.id})
    assert document is not None
    assert (document["attempt"], document["fence"], document["schema_version"]) == (2, 2, SCHEMA_VERSION)


async def test_commits_that_meet_share_batches(mongo_store: MongoStore) -> None:
    await mongo_store.insert_tasks([make_task(num_generations=32)])
    (claim,) = await mongo_store.claim_tasks(split="train", owner="w", lease_s=60, limit=1)
    records = await mongo_store.open_records(claim)
    await asyncio.gather(*(mongo_store.commit_turn(record, make_turn(record)) for record in records))
    barriers = await mongo_store._database.durable("JournalBarrier").find({}).to_list()
    assert sum(barrier["num_batches"] for barrier in barriers) <= 2
