"""A small finished run, made by the real code, and the means to falsify what it stored: for tests of the audit."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import pymongo
import pytest

from agentrl.chat import ChatFormat
from agentrl.config import AlgoConfig, InferenceConfig, RolloutConfig, RunConfig, RunSection
from agentrl.errors import EngineError, EngineErrorKind, StaleClaimError
from agentrl.protocols import Store
from agentrl.rollout.agent import Agent
from agentrl.rollout.custom import sampler_of
from agentrl.rollout.group_scores import GroupScores
from agentrl.rollout.groups import GroupRunner
from agentrl.store import MemoryStore
from agentrl.store.dispatch_documents import turn_to_documents
from agentrl.store.documents import record_to_document, settlement_to_document
from agentrl.store.ledger_documents import engine_quarantine_to_document, sequence_to_document, step_to_document
from agentrl.store.scores import score_to_document
from agentrl.tools import FunctionToolbox
from agentrl.types import (
    DBRecordData,
    DispatchedSamplingTask,
    EngineQuarantine,
    PolicyVersion,
    Record,
    Score,
    StepStatus,
    Task,
    TaskClaim,
    TrainStep,
    Turn,
)
from factories import make_turn
from scripted_engine import ScriptedEngine

CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
CONFIG = RunConfig(
    run=RunSection(run_name="audited"),
    rollout=RolloutConfig(num_generations=2, max_new_tokens=200, max_prompt_tokens=2000),
    inference=InferenceConfig(context_length=4000),
    algo=AlgoConfig(max_staleness=1, tasks_per_step=2),
)
HALVING = CONFIG.model_copy(update={"algo": AlgoConfig(max_staleness=1, tasks_per_step=2, score_version="0.5*em")})
TRAINED = "train:0:q0"  # in step 1
LATER = "train:0:q2"  # in step 2
FAILED = "train:0:failing"  # one Record failed; dropped in step 2
EASY = "train:0:easy"  # no signal; consumed without a step
PLANNED = "train:0:q3"  # in step 3, which is not committed
HALVED = "train:0:q4"  # settled with scores of another version; in step 3, too
PENDING = "train:0:untouched"
EVALUATED = "eval-v1:0:q0"


def add(a: int, b: int) -> str:
    """Sum of two integers."""
    return str(a + b)


def script(context: str, depth: int) -> str | BaseException:
    """The first Record of a group calls the tool and is right, the second one guesses."""
    if "<tool_response>" in context:
        return "<answer>5</answer>"
    if "easy" in context:
        return "<answer>5</answer>"
    if depth == 0:
        return CALL
    if "failing" in context:
        return EngineError("down", kind=EngineErrorKind.REJECTED)
    return "<answer>6</answer>"


def make_task(name: str, *, split: str = "train") -> Task:
    return Task(
        id=f"{split}:0:{name}", item_id=name, split=split, epoch=0, query=f"{name}: 2+3?", answer="5", num_generations=2
    )


async def make_run(store: Store, *, model_dir: Path, run_dir: Path) -> None:
    """Two committed steps, one planned, a group of every outcome, a takeover with late work, a checkpoint."""
    engine = ScriptedEngine(model_dir, script)
    runner = make_runner(store, engine, model_dir)
    await store.publish_policy(PolicyVersion(version=0, path="v0"))
    await sample(store, runner, "q0", "q1")
    await train(store, step=1)
    engine.version = 1
    await sample(store, runner, "q2", "failing")
    await train(store, step=2)
    await sample(store, runner, "easy")
    await store.drop_groups({EASY: "zero_advantage"})
    await sample_after_takeover(store, runner, "q3")
    await sample(store, make_runner(store, engine, model_dir, config=HALVING), "q4")
    await sample(store, runner, "q0", split="eval-v1")
    await store.plan_step(await next_step(store, step=3, limit=2))
    await store.insert_tasks([make_task("untouched")])
    checkpoint = run_dir / "checkpoints" / "step_2"
    checkpoint.mkdir(parents=True)
    (checkpoint / "checkpoint.json").write_text(json.dumps({"step": 2, "metrics": {}, "num_processes": 1}))


def make_runner(store: Store, engine: ScriptedEngine, model_dir: Path, *, config: RunConfig = CONFIG) -> GroupRunner:
    agent = Agent(
        chat=ChatFormat.load(model_dir),
        client=engine,
        toolbox=FunctionToolbox([add]),
        journal=store,
        commit_turn=store.commit_turn,
        rollout=config.rollout,
        inference=config.inference,
        reflection=config.reflection,
        tool_timeout_s=5.0,
        clock=lambda: datetime.now(UTC),
    )
    return GroupRunner(
        config=config,
        store=store,
        agent=agent,
        sampler_class=sampler_of(config),
        slots=asyncio.Semaphore(8),
        group_scores=GroupScores.from_config(config, scoring=agent.scoring, store=store),
    )


async def sample(store: Store, runner: GroupRunner, *names: str, split: str = "train") -> None:
    """Claim, sample and settle."""
    for name in names:
        await store.insert_tasks([make_task(name, split=split)])
        await runner.run(await claim(store, split=split, lease_s=60))


async def sample_after_takeover(store: Store, runner: GroupRunner, name: str) -> None:
    """The first claimer is too slow: its turn is refused."""
    await store.insert_tasks([make_task(name)])
    (slow, *_) = await store.open_records(await claim(store, split="train", lease_s=-1))
    await store.reap_expired_claims(split="train")
    second = await claim(store, split="train", lease_s=60)
    await store.open_records(second)
    with pytest.raises(StaleClaimError):
        await store.commit_turn(slow, make_turn(slow))
    await runner.run(second)


async def claim(store: Store, *, split: str, lease_s: float) -> TaskClaim:
    (taken,) = await store.claim_tasks(split=split, owner="worker", lease_s=lease_s, limit=1)
    return taken


async def next_step(store: Store, *, step: int, limit: int) -> TrainStep:
    groups = await store.settled_groups(split="train", limit=limit)
    dropped = {group.settlement.task_id: group.settlement.drop_reason for group in groups if not group.sequences}
    return TrainStep(
        step=step,
        status=StepStatus.PLANNED,
        policy_version=step - 1,
        task_ids=tuple(group.settlement.task_id for group in groups),
        sequence_ids=tuple(row.id for group in groups for row in group.sequences),
        dropped={task_id: reason or "" for task_id, reason in dropped.items()},
        score_versions={
            group.settlement.task_id: group.settlement.score_version
            for group in groups
            if group.settlement.score_version is not None
        },
    )


async def train(store: Store, *, step: int) -> None:
    """Plan, commit and publish as the trainer does; the metrics are counted from the plan's rows."""
    plan = await store.plan_step(await next_step(store, step=step, limit=2))
    rows = await store.load_sequences(plan.sequence_ids)
    staleness = [plan.policy_version - row.policy_versions[row.loss_mask] for row in rows]
    metrics = {
        "num_trained_tokens": float(sum(int(row.loss_mask.sum()) for row in rows)),
        "num_tokens": float(sum(row.token_ids.size for row in rows)),
        "num_sequences": float(len(rows)),
        "staleness_max": float(max(int(values.max()) for values in staleness)),
    }
    await store.publish_policy(PolicyVersion(version=step, path=f"v{step}"))
    await store.commit_step(replace(plan, metrics=metrics, checkpoint=f"step_{step}"))


class Forger(Protocol):
    """Changes stored facts behind the store's back, one kind of document per method."""

    async def put_record(self, record: Record) -> None: ...
    async def put_turn(self, turn: Turn) -> None: ...
    async def put_row(self, row: DBRecordData) -> None: ...
    async def put_step(self, step: TrainStep) -> None: ...
    async def set_state(self, task_id: str, **fields: Any) -> None: ...
    async def remove(self, kind: str, key: Any) -> None: ...
    async def refuse(self, turn_id: str) -> None: ...
    async def put_quarantine(self, quarantine: EngineQuarantine) -> None: ...
    async def put_score(self, score: Score) -> None: ...


class MemoryForger:
    """For MemoryStore."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store

    async def put_record(self, record: Record) -> None:
        self.store._records[record.id] = record

    async def put_turn(self, turn: Turn) -> None:
        self.store._turns[turn.model.id] = turn

    async def put_row(self, row: DBRecordData) -> None:
        self.store._sequences[row.id] = row

    async def put_step(self, step: TrainStep) -> None:
        self.store._steps[step.step] = step

    async def set_state(self, task_id: str, **fields: Any) -> None:
        for name, value in fields.items():
            setattr(self.store._tasks[task_id], name, value)

    async def remove(self, kind: str, key: Any) -> None:
        if kind == "DispatchedSamplingTask" and key not in self.store._turns:
            turn_id = key.rpartition("/")[0]
            turn = self.store._turns[turn_id]
            self.store._turns[turn_id] = replace(turn, tools=tuple(call for call in turn.tools if call.id != key))
            return
        places = {
            "Task": self.store._tasks,
            "Record": self.store._records,
            "DispatchedSamplingTask": self.store._turns,
            "DBRecordData": self.store._sequences,
            "TrainStep": self.store._steps,
            "PolicyVersion": self.store._policies,
        }
        del places[kind][key]

    async def refuse(self, turn_id: str) -> None:
        self.store._refusal("forged", fence=1, ids=[turn_id])

    async def put_quarantine(self, quarantine: EngineQuarantine) -> None:
        self.store._quarantines[quarantine.id] = quarantine

    async def put_score(self, score: Score) -> None:
        self.store._scores[score.id] = score


class MongoForger:
    """For MongoStore: writes with a client of its own, and can undo."""

    def __init__(self, uri: str, database: str) -> None:
        self.database: Any = pymongo.MongoClient(uri)[database]
        self.original = self._contents()

    def restore(self) -> None:
        """Undo everything since the forger came."""
        changed = self._contents()
        for kind, documents in self.original.items():
            for key, document in documents.items():
                if changed[kind].pop(key, None) != document:
                    self._put(kind, document)
        for kind, extra in changed.items():
            for key in extra:
                self.database[kind].delete_one({"_id": key})

    def _contents(self) -> dict[str, dict[Any, dict[str, Any]]]:
        names = self.database.list_collection_names()
        return {name: {document["_id"]: document for document in self.database[name].find({})} for name in names}

    def _put(self, kind: str, document: dict[str, Any]) -> None:
        self.database[kind].replace_one({"_id": document["_id"]}, document, upsert=True)

    async def put_record(self, record: Record) -> None:
        self._put("Record", record_to_document(record))

    async def put_turn(self, turn: Turn) -> None:
        for encoded in turn_to_documents(turn):
            self._put("DispatchedSamplingTask", encoded.document)
            for part in encoded.parts:
                self._put("TokenPart", part)

    async def put_row(self, row: DBRecordData) -> None:
        self._put("DBRecordData", sequence_to_document(row).document)

    async def put_step(self, step: TrainStep) -> None:
        self._put("TrainStep", step_to_document(step))

    async def set_state(self, task_id: str, **fields: Any) -> None:
        if "settlement" in fields and fields["settlement"] is not None:
            stored = self.database["Task"].find_one({"_id": task_id})["settlement"]["sequences"]
            document = settlement_to_document(fields["settlement"], sequences=())
            fields["settlement"] = {**document, "sequences": stored}
        self.database["Task"].update_one({"_id": task_id}, {"$set": fields})

    async def remove(self, kind: str, key: Any) -> None:
        assert self.database[kind].delete_one({"_id": key}).deleted_count == 1

    async def refuse(self, turn_id: str) -> None:
        self._put("Quarantine", {"_id": "forged", "reason": "fence 1 is old", "dispatch_ids": [turn_id]})

    async def put_quarantine(self, quarantine: EngineQuarantine) -> None:
        document = engine_quarantine_to_document(quarantine)
        self._put("EngineQuarantine", {**document, "raised_at": quarantine.raised_at})

    async def put_score(self, score: Score) -> None:
        self._put("Score", score_to_document(score))


def with_call(turn: Turn, change: Callable[[DispatchedSamplingTask], DispatchedSamplingTask]) -> Turn:
    """The turn with another model call."""
    return replace(turn, model=change(turn.model))
