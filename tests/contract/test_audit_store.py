"""What agentrl.protocols.AuditStore promises, checked against every implementation (fixture `store`)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from agentrl.algo.trie import summarise_group
from agentrl.errors import StaleClaimError
from agentrl.protocols import Store
from agentrl.types import PolicyVersion, Record, StepStatus, TaskClaim, TaskStatus, TrainStep
from factories import make_sequence, make_settlement, make_task, make_turn


async def claimed(store: Store, item_id: str = "q1", *, split: str = "train", lease_s: float = 60.0) -> TaskClaim:
    await store.insert_tasks([make_task(item_id, split=split)])
    (claim,) = await store.claim_tasks(split=split, owner="worker", lease_s=lease_s, limit=1)
    return claim


async def settled(store: Store, item_id: str = "q1") -> list[Record]:
    claim = await claimed(store, item_id)
    records = await store.open_records(claim)
    await store.settle_task(claim, make_settlement(claim.task), [make_sequence(record) for record in records])
    return records


async def test_tasks_and_records_of_every_split_are_listed_by_id(store: Store) -> None:
    await store.open_records(await claimed(store, "q2"))
    await store.open_records(await claimed(store, "q1", split="eval"))
    assert await store.list_task_ids() == ["eval:0:q1", "train:0:q2"]
    assert await store.list_record_ids() == ["eval:0:q1/g0", "eval:0:q1/g1", "train:0:q2/g0", "train:0:q2/g1"]


async def test_a_task_comes_with_its_state_at_every_stage_of_its_life(store: Store) -> None:
    task = make_task()
    await store.insert_tasks([task])
    (pending,) = await store.find_tasks([task.id])
    assert (pending.task, pending.status, pending.fence, pending.lease_until) == (task, TaskStatus.PENDING, 0, None)
    assert (pending.settlement, pending.sequences) == (None, ())

    (claim,) = await store.claim_tasks(split="train", owner="worker", lease_s=60, limit=1)
    (running,) = await store.find_tasks([task.id])
    assert (running.status, running.fence) == (TaskStatus.RUNNING, 1)
    assert running.lease_until is not None

    rows = [make_sequence(record) for record in await store.open_records(claim)]
    await store.settle_task(claim, make_settlement(task), rows)
    (done,) = await store.find_tasks([task.id])
    assert (done.status, done.settlement, done.lease_until) == (TaskStatus.SETTLED, make_settlement(task), None)
    assert done.sequences == summarise_group(rows)

    step = TrainStep(
        step=1, status=StepStatus.PLANNED, policy_version=0, task_ids=(task.id,), sequence_ids=(),
        dropped={task.id: "stale"},
    )  # fmt: skip
    await store.plan_step(step)
    await store.commit_step(step)
    (consumed,) = await store.find_tasks([task.id])
    assert (consumed.status, consumed.consumed_step, consumed.drop_reason) == (TaskStatus.CONSUMED, 1, "stale")


async def test_a_group_dropped_without_a_step_says_why(store: Store) -> None:
    await settled(store)
    await store.drop_groups({"train:0:q1": "stale"})
    (state,) = await store.find_tasks(["train:0:q1"])
    assert (state.status, state.consumed_step, state.drop_reason) == (TaskStatus.CONSUMED, None, "stale")


async def test_hundreds_of_ids_are_found_at_once_and_unknown_ones_are_left_out(store: Store) -> None:
    tasks = [make_task(f"q{index}") for index in range(300)]
    await store.insert_tasks(tasks)
    found = await store.find_tasks([*(task.id for task in tasks), "train:0:nobody"])
    assert sorted(state.task.id for state in found) == sorted(task.id for task in tasks)
    assert await store.find_records(["train:0:nobody/g0"]) == []
    assert await store.find_sequences(["train:0:nobody/g0/s0"]) == []
    assert await store.find_dispatches(["train:0:nobody/g0/000.1"]) == {}


async def test_calls_of_many_turns_are_found_by_turn_in_order(store: Store) -> None:
    (record, _) = await store.open_records(await claimed(store))
    turns = []
    for index in range(70):
        turns.append(make_turn(record, tool_results=("one", "two") if index == 3 else ()))
        record = await store.commit_turn(record, turns[-1])
    calls = await store.find_dispatches(record.turn_ids)
    assert calls == {turn.model.id: [turn.model, *turn.tools] for turn in turns}
    (header,) = await store.find_records([record.id])
    assert header.turn_ids == record.turn_ids


async def test_rows_are_found_bit_equal(store: Store) -> None:
    records = await settled(store)
    wanted = make_sequence(records[0])
    (row,) = await store.find_sequences([wanted.id])
    assert row.summary == wanted.summary
    assert np.array_equal(row.token_ids, wanted.token_ids)


async def test_every_published_policy_is_listed_in_order(store: Store) -> None:
    for version in (0, 2, 1):
        await store.publish_policy(PolicyVersion(version=version, path=f"v{version}"))
    assert [policy.version for policy in await store.list_policies()] == [0, 1, 2]


async def test_refused_turns_rows_and_results_are_listed_with_what_they_would_have_written(store: Store) -> None:
    slow = await claimed(store, lease_s=-1)
    (record, *_) = await store.open_records(slow)
    await store.reap_expired_claims(split="train")
    (fast,) = await store.claim_tasks(split="train", owner="other", lease_s=60, limit=1)
    await store.open_records(fast)
    turn = make_turn(record, tool_results=("late",))
    row = make_sequence(record)
    with pytest.raises(StaleClaimError):
        await store.commit_turn(record, turn)
    with pytest.raises(StaleClaimError):
        await store.settle_task(slow, replace(make_settlement(slow.task)), [row])
    works = await store.list_quarantined()
    assert sorted(ids for work in works for ids in work.ids) == sorted([turn.model.id, turn.tools[0].id, row.id])
    assert all("fence 1 is old" in work.reason for work in works)
