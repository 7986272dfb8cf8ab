"""The trainer's ledger: which groups and rows each optimizer step used, and the policy versions that came of it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from agentrl.errors import StoreError
from agentrl.store import codec
from agentrl.store.connection import Database
from agentrl.store.documents import settled_group_from_document
from agentrl.store.indexes import POLICY_VERSION, TASK, TRAIN_STEP
from agentrl.store.ledger_documents import (
    alarms_to_documents,
    policy_from_document,
    policy_to_document,
    step_from_document,
    step_to_document,
)
from agentrl.types import PolicyVersion, SettledGroup, StepStatus, TaskStatus, TrainStep


class Ledger:
    """TrainStep and PolicyVersion, and the consumption marks on Tasks."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._newest_version = -1  # only grows: where to look for the next

    async def settled_groups(self, *, split: str, limit: int) -> list[SettledGroup]:
        """See TrainStore.settled_groups."""
        query = {"split": split, "status": TaskStatus.SETTLED.value}
        fields = {"schema_version": 1, "settlement": 1, "settled_at": 1, "mean_tool_calls": 1}
        tasks = self._database.durable(TASK)
        found = await self._database.run(
            "list settled groups", lambda: tasks.find(query, fields).sort("settled_at", 1).limit(limit).to_list()
        )
        return [settled_group_from_document(document) for document in found]

    async def plan(self, step: TrainStep) -> TrainStep:
        """See TrainStore.plan_step."""
        plan_token = uuid.uuid4().hex
        planned_at = await self._database.stamp(step.planned_at)
        plan = replace(step, status=StepStatus.PLANNED, planned_at=planned_at)
        return await self._database.run("plan a step", lambda: self._insert_plan(plan, plan_token))

    async def _insert_plan(self, plan: TrainStep, plan_token: str) -> TrainStep:
        steps = self._database.durable(TRAIN_STEP)
        document = {**step_to_document(plan), "plan_token": plan_token}
        if not await self._database.insert_new(steps, [document]):
            return plan
        # The token tells this call's own plan, whose reply was lost, from an earlier one.
        await steps.update_one({"_id": plan.step, "plan_token": {"$ne": plan_token}}, {"$inc": {"attempts": 1}})
        return step_from_document(await steps.find_one({"_id": plan.step}) or document)

    async def _consume(self, step: TrainStep) -> None:
        kept = {*step.dropped, *step.retained}
        trained = [task_id for task_id in step.task_ids if task_id not in kept]
        await self._mark(trained, {"consumed_step": step.step})
        for reason in dict.fromkeys(step.dropped.values()):
            dropped = [task_id for task_id, why in step.dropped.items() if why == reason]
            await self._mark(dropped, {"consumed_step": step.step, "drop_reason": reason})

    async def _mark(self, task_ids: list[str], marks: Mapping[str, Any]) -> None:
        if not task_ids:
            return
        query = {"_id": {"$in": task_ids}, "status": TaskStatus.SETTLED.value}
        update = {"$set": {"status": TaskStatus.CONSUMED.value, **marks}}
        tasks = self._database.durable(TASK)
        await self._database.run("mark groups consumed", lambda: tasks.update_many(query, update))

    async def drop(self, drops: Mapping[str, str]) -> None:
        """See TrainStore.drop_groups."""
        for reason in dict.fromkeys(drops.values()):
            await self._mark([task_id for task_id, why in drops.items() if why == reason], {"drop_reason": reason})

    async def get(self, step: int) -> TrainStep | None:
        """See TrainStore.get_step."""
        steps = self._database.durable(TRAIN_STEP)
        document = await self._database.run("read a step", lambda: steps.find_one({"_id": step}))
        return None if document is None else step_from_document(document)

    async def commit(self, step: TrainStep) -> None:
        """See TrainStore.commit_step. Groups first: a step that reads as committed has consumed its groups."""
        plan = await self.get(step.step)
        if plan is None:
            raise StoreError(f"step {step.step} has no plan: call plan_step before commit_step")
        await self._consume(plan)
        fields = {
            "status": StepStatus.COMMITTED.value,
            "metrics": codec.encode_json_value(step.metrics),
            "alarms": alarms_to_documents(step.alarms),
            "checkpoint": step.checkpoint,
            "committed_at": await self._database.stamp(step.committed_at),
        }
        update = partial(self._database.durable(TRAIN_STEP).update_one, {"_id": step.step}, {"$set": fields})
        await self._database.run("commit a step", update)

    async def list_steps(self) -> list[TrainStep]:
        """See ReadStore.list_steps."""
        steps = self._database.durable(TRAIN_STEP)
        found = await self._database.run("list steps", lambda: steps.find({}).to_list())
        return [step_from_document(document) for document in sorted(found, key=lambda document: document["_id"])]

    async def steps_of_task(self, task_id: str) -> list[TrainStep]:
        """See ReadStore.steps_of_task."""
        steps = self._database.durable(TRAIN_STEP)
        found = await self._database.run("list steps of a task", lambda: steps.find({"task_ids": task_id}).to_list())
        return [step_from_document(document) for document in sorted(found, key=lambda document: document["_id"])]

    async def publish(self, version: PolicyVersion) -> None:
        """See TrainStore.publish_policy."""
        document = policy_to_document(replace(version, created_at=await self._database.stamp(version.created_at)))
        versions = self._database.durable(POLICY_VERSION)
        query = {"_id": version.version}
        await self._database.run("publish a policy", lambda: versions.replace_one(query, document, upsert=True))

    async def latest_policy(self) -> PolicyVersion | None:
        """See TaskStore.latest_policy. Reads only versions from the newest known on: they are never taken back."""
        versions = self._database.durable(POLICY_VERSION)
        query = {"version": {"$gte": self._newest_version}}
        found = await self._database.run("read the newest policy", lambda: versions.find(query).to_list())
        if not found:
            return None
        newest = policy_from_document(max(found, key=lambda document: document["version"]))
        self._newest_version = newest.version
        return newest
