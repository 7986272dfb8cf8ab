"""A step that retains a group leaves it to be trained again, on every store; kill and replay change nothing."""

from __future__ import annotations

from dataclasses import replace

from agentrl.protocols import Store
from agentrl.types import StepStatus, TaskStatus, TrainStep
from factories import make_sequence, make_settlement, make_task


def plan(step: int, *, retained: tuple[str, ...]) -> TrainStep:
    return TrainStep(
        step=step,
        status=StepStatus.PLANNED,
        policy_version=step - 1,
        task_ids=("train:0:q1", "train:0:q2"),
        sequence_ids=("train:0:q1/g0/s0", "train:0:q2/g0/s0"),
        retained=retained,
    )


async def settled(store: Store) -> None:
    for name in ("q1", "q2"):
        task = make_task(name)
        await store.insert_tasks([task])
        (claim,) = await store.claim_tasks(split="train", owner="w", lease_s=60, limit=1)
        record, _ = await store.open_records(claim)
        await store.settle_task(claim, make_settlement(task), [make_sequence(record)])


async def train(store: Store, entry: TrainStep) -> None:
    entry = await store.plan_step(entry)
    await store.commit_step(replace(entry, status=StepStatus.COMMITTED))


async def statuses(store: Store) -> dict[str, tuple[TaskStatus, int | None]]:
    states = await store.find_tasks(["train:0:q1", "train:0:q2"])
    return {state.task.id: (state.status, state.consumed_step) for state in states}


async def test_a_retained_group_stays_settled_and_the_others_are_consumed(store: Store) -> None:
    await settled(store)
    await train(store, plan(1, retained=("train:0:q2",)))
    assert await statuses(store) == {
        "train:0:q1": (TaskStatus.CONSUMED, 1),
        "train:0:q2": (TaskStatus.SETTLED, None),
    }
    (left,) = await store.settled_groups(split="train", limit=9)
    assert left.settlement.task_id == "train:0:q2"


async def test_the_ledger_says_what_a_step_retained(store: Store) -> None:
    await settled(store)
    await train(store, plan(1, retained=("train:0:q2",)))
    entry = await store.get_step(1)
    assert entry is not None
    assert entry.retained == ("train:0:q2",)


async def test_replaying_the_step_that_retained_a_group_does_not_bring_it_back(store: Store) -> None:
    await settled(store)
    await train(store, plan(1, retained=("train:0:q1", "train:0:q2")))
    await train(store, plan(2, retained=()))
    consumed = {"train:0:q1": (TaskStatus.CONSUMED, 2), "train:0:q2": (TaskStatus.CONSUMED, 2)}
    assert await statuses(store) == consumed
    await train(store, plan(1, retained=()))  # a resume from an older checkpoint; the first plan wins
    assert await statuses(store) == consumed
    assert await store.settled_groups(split="train", limit=9) == []
