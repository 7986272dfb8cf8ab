"""The ledger heals what a crash left half done, and reads the newest policy without reading them all."""

from __future__ import annotations

from agentrl.store.indexes import TASK
from agentrl.store.mongo import MongoStore
from agentrl.types import PolicyVersion, StepStatus, TrainStep
from factories import make_settlement, make_task


async def settle(store: MongoStore, name: str) -> None:
    await store.insert_tasks([make_task(name)])
    (claim,) = await store.claim_tasks(split="train", owner="w", lease_s=60, limit=1)
    await store.settle_task(claim, make_settlement(claim.task), [])


def step_of(*names: str, dropped: dict[str, str] | None = None) -> TrainStep:
    task_ids = tuple(f"train:0:{name}" for name in names)
    return TrainStep(
        step=1, status=StepStatus.PLANNED, policy_version=0, task_ids=task_ids, sequence_ids=(), dropped=dropped or {}
    )


async def test_consumed_groups_name_their_step_and_dropped_ones_their_reason(mongo_store: MongoStore) -> None:
    for name in "abc":
        await settle(mongo_store, name)
    plan = await mongo_store.plan_step(step_of("a", "b", dropped={"train:0:b": "too stale"}))
    await mongo_store.commit_step(plan)
    await mongo_store.drop_groups({"train:0:c": "zero advantage"})
    tasks = mongo_store._database.durable(TASK)
    marks = {task["item_id"]: (task.get("consumed_step"), task.get("drop_reason")) async for task in tasks.find({})}
    assert marks == {"a": (1, None), "b": (1, "too stale"), "c": (None, "zero advantage")}


async def test_a_crash_between_consuming_and_committing_is_healed_by_committing_again(mongo_store: MongoStore) -> None:
    await settle(mongo_store, "a")
    plan = await mongo_store.plan_step(step_of("a"))
    await mongo_store._ledger._consume(plan)
    assert await mongo_store.plan_step(plan) != plan, "a resume finds the plan and replays it"
    await mongo_store.commit_step(plan)
    step = await mongo_store.get_step(1)
    assert step is not None
    assert (step.status, step.attempts) == (StepStatus.COMMITTED, 2)


async def test_the_newest_policy_is_looked_for_from_the_newest_known_on(mongo_store: MongoStore) -> None:
    for version in (3, 4):
        await mongo_store.publish_policy(PolicyVersion(version=version, path=f"p{version}"))
    assert await mongo_store.latest_policy() is not None
    assert mongo_store._ledger._newest_version == 4
    await mongo_store.publish_policy(PolicyVersion(version=7, path="p7"))
    newest = await mongo_store.latest_policy()
    assert newest is not None
    assert (newest.version, mongo_store._ledger._newest_version) == (7, 7)
