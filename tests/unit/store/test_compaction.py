"""Compaction takes what nothing can refer to any more, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest

from agentrl.errors import StaleClaimError
from agentrl.store.compaction import MIN_AGE, find_orphans, remove
from agentrl.store.connection import Database
from agentrl.store.indexes import DISPATCH, QUARANTINE, TOKEN_PART
from agentrl.store.mongo import MongoStore
from agentrl.types import DispatchKind, Record, RecordStatus, StopReason, TaskClaim
from factories import make_sequence, make_settlement, make_task, make_turn

NOW = timedelta(0)
NOISE = np.random.default_rng(0)
LONG_PROMPT = NOISE.integers(0, 2**31 - 1, 1_200_000).tolist()  # two parts of its own
SHARED_PROMPT = tuple(range(500))


async def ids(database: Database, name: str) -> set[str]:
    return {document["_id"] async for document in database.durable(name).find({}, {"_id": 1})}


async def zombie_then_owner(store: MongoStore) -> tuple[Record, TaskClaim, list[Record]]:
    """A Record under an old fence, with one committed turn, and the same group opened by its next owner."""
    await store.insert_tasks([make_task("a/g1", num_generations=2)])
    (old,) = await store.claim_tasks(split="train", owner="zombie", lease_s=-1, limit=1)
    zombie, _ = await store.open_records(old)
    zombie = await store.commit_turn(zombie, make_turn(zombie, prompt_ids=SHARED_PROMPT))
    await store.reap_expired_claims(split="train")
    (new,) = await store.claim_tasks(split="train", owner="owner", lease_s=60, limit=1)
    return zombie, new, await store.open_records(new)


async def settle(store: MongoStore, claim: TaskClaim, records: list[Record]) -> list[Record]:
    final = []
    for record in records:
        extended = await store.commit_turn(record, make_turn(record, prompt_ids=SHARED_PROMPT, tool_results=("3",)))
        done = replace(extended, status=RecordStatus.FINISHED, stop_reason=StopReason.ANSWER, score=1.0)
        await store.finish_record(done)
        final.append(done)
    await store.settle_task(claim, make_settlement(claim.task), [make_sequence(record) for record in final])
    return final


async def late_turn(store: MongoStore, zombie: Record) -> None:
    """A turn that comes after the claim was lost, with parts of its own."""
    with pytest.raises(StaleClaimError):
        await store.commit_turn(zombie, make_turn(zombie, prompt_ids=LONG_PROMPT))


async def test_late_dispatches_and_their_parts_go_and_everything_committed_stays(mongo_store: MongoStore) -> None:
    database = mongo_store._database
    zombie, claim, records = await zombie_then_owner(mongo_store)
    await late_turn(mongo_store, zombie)
    final = await settle(mongo_store, claim, records)
    turns = {record.id: await mongo_store.load_turns(record) for record in final}
    before = {name: await ids(database, name) for name in (DISPATCH, TOKEN_PART, QUARANTINE)}

    orphans = await find_orphans(database, older_than=NOW)
    assert orphans.dispatch_ids == [f"{zombie.id}/1.{zombie.fence}"]
    assert len(orphans.part_ids) == 2
    assert orphans.num_bytes > 4 * 1_000_000
    assert {name: await ids(database, name) for name in before} == before, "looking changes nothing"

    assert await remove(database, orphans) == 3
    assert await ids(database, DISPATCH) == before[DISPATCH] - set(orphans.dispatch_ids)
    assert await ids(database, TOKEN_PART) == before[TOKEN_PART] - set(orphans.part_ids)
    assert await ids(database, QUARANTINE) == before[QUARANTINE]
    assert {record.id: await mongo_store.load_turns(record) for record in final} == turns
    assert len(await mongo_store.load_sequences([f"{record.id}/s0" for record in final])) == 2
    again = await find_orphans(database, older_than=NOW)
    assert (again.dispatch_ids, again.part_ids) == ([], [])


async def test_what_is_younger_than_an_hour_stays(mongo_store: MongoStore) -> None:
    zombie, claim, records = await zombie_then_owner(mongo_store)
    await late_turn(mongo_store, zombie)
    await settle(mongo_store, claim, records)
    orphans = await find_orphans(mongo_store._database, older_than=MIN_AGE)
    assert (orphans.dispatch_ids, orphans.part_ids, orphans.num_bytes) == ([], [], 0)


async def test_an_unfinished_task_keeps_everything(mongo_store: MongoStore) -> None:
    zombie, _, _ = await zombie_then_owner(mongo_store)
    await late_turn(mongo_store, zombie)
    orphans = await find_orphans(mongo_store._database, older_than=NOW)
    assert (orphans.dispatch_ids, orphans.part_ids) == ([], [])


async def test_parts_of_a_turn_whose_dispatch_never_came_go(mongo_store: MongoStore) -> None:
    database = mongo_store._database
    _, claim, records = await zombie_then_owner(mongo_store)
    await settle(mongo_store, claim, records)
    task_id = claim.task.id
    orphan_ids = {
        f"{DISPATCH}:{task_id}/g0/7.1#0",
        f"{DISPATCH}:{task_id}/g0/7.1/2#0",
        f"Prompt:{task_id}:{'0' * 64}#0",
        f"DBRecordData:{task_id}/g0/s9#0",
    }
    kept_ids = {
        f"{DISPATCH}:train:0:unknown/g0/0.1#0",
        "Something:else#0",
    }
    for part_id in sorted(orphan_ids | kept_ids):
        await database.durable(TOKEN_PART).insert_one({"_id": part_id, "schema_version": 1, "bytes": b"x"})
    orphans = await find_orphans(database, older_than=NOW)
    assert set(orphans.part_ids) == orphan_ids


async def test_an_attempt_kept_in_quarantine_keeps_its_turns(mongo_store: MongoStore) -> None:
    database = mongo_store._database
    zombie, claim, records = await zombie_then_owner(mongo_store)
    await late_turn(mongo_store, zombie)
    await settle(mongo_store, claim, records)
    turn_id = f"{zombie.id}/1.{zombie.fence}"
    entry = {
        "_id": "attempt 1",
        "reason": "failed with timeout and was sampled again",
        "header": {"turn_ids": [turn_id]},
    }
    await database.durable(QUARANTINE).insert_one(entry)
    orphans = await find_orphans(database, older_than=NOW)
    assert (orphans.dispatch_ids, orphans.part_ids) == ([], [])


async def test_judge_calls_and_their_parts_stay_though_they_belong_to_no_turn(mongo_store: MongoStore) -> None:
    await mongo_store.insert_tasks([make_task("j", num_generations=2)])
    (claim,) = await mongo_store.claim_tasks(split="train", owner="owner", lease_s=60, limit=1)
    record, _ = await settle(mongo_store, claim, await mongo_store.open_records(claim))
    (turn, *_) = await mongo_store.load_turns(record)
    call = replace(
        turn.model, id=f"{record.id}/judge.{'0a' * 16}", kind=DispatchKind.JUDGE, tokens=None, target="judge",
        response={"text": "x" * 9_000_000},
    )  # fmt: skip
    await mongo_store.put_calls([call])
    orphans = await find_orphans(mongo_store._database, older_than=NOW)
    assert (orphans.dispatch_ids, orphans.part_ids) == ([], [])
    await remove(mongo_store._database, orphans)
    assert await mongo_store.list_calls(record.id) == [call]
