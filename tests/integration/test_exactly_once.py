"""A group completes exactly once, wherever its owner loses the claim: two workers, and a claim that is taken away.

Claims are lost at every point where a worker waits for the store; on a database these are before and after every
single operation, so also in the middle of opening, committing and settling. The old owner never hears of it, and works
on until it is refused.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.algo.settle import is_scored, settle_group
from agentrl.chat import ChatFormat
from agentrl.config import InferenceConfig, RolloutConfig, RunConfig
from agentrl.errors import EngineError, EngineErrorKind, StaleClaimError
from agentrl.inspector.audit import audit_run
from agentrl.protocols import Store
from agentrl.rollout.agent import Agent
from agentrl.rollout.groups import GroupRunner
from agentrl.rollout.sampler import MCPSampler
from agentrl.store import MemoryStore, MongoStore
from agentrl.tools import FunctionToolbox
from agentrl.types import DBRecordData, GroupSettlement, Record, Recovery, Task, TaskClaim, Turn
from factories import make_task
from scripted_engine import ScriptedEngine
from tiny_chat import write_tiny_chat

CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
NUM_GENERATIONS = 2
LIMIT_S = 30.0
MOST_POINTS_TRIED = 24
WORKER_METHODS = ("open_records", "load_turns", "commit_turn", "finish_record", "reopen_record", "settle_task")
task_numbers = itertools.count()


def add(a: int, b: int) -> str:
    """Sum of two integers."""
    return str(a + b)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat(tmp_path_factory.mktemp("chat"))


@dataclass
class Points:
    """The points at which workers wait, counted; at those of `losing` the live claim is taken away."""

    store: Store
    losing: frozenset[int] = frozenset()
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    num_passed: int = 0
    num_lost: int = 0
    live: TaskClaim | None = None
    is_taking: bool = False

    async def pass_one(self) -> None:
        """One point: perhaps lose the claim, and let others run for a while."""
        if self.is_taking:
            return
        number, self.num_passed = self.num_passed, self.num_passed + 1
        if number in self.losing and self.live is not None:
            self.is_taking, claim = True, self.live
            await self.store.release_claim(claim)
            self.is_taking, self.live = False, None
            self.num_lost += 1
        for _ in range(self.rng.randrange(4)):
            await asyncio.sleep(0)

    def around(self, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """The call, with a point before and after it."""

        async def passing(*arguments: Any, **named: Any) -> Any:
            await self.pass_one()
            result = await call(*arguments, **named)
            await self.pass_one()
            return result

        return passing


def hook(points: Points, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every wait of the store a point."""
    if isinstance(points.store, MongoStore):
        database = points.store._database  # the waits inside a store method are the interesting ones
        monkeypatch.setattr(database, "run", points.around(database.run))
        return
    for name in WORKER_METHODS:
        monkeypatch.setattr(points.store, name, points.around(getattr(points.store, name)))


class Group:
    """One Task and the workers that compete for it."""

    def __init__(self, points: Points, *, model_dir: Path, chat: ChatFormat, fails_every: int | None) -> None:
        self.points = points
        self.store = points.store
        self.task: Task = replace(
            make_task(f"q{next(task_numbers)}", num_generations=NUM_GENERATIONS, split="train", answer="5")
        )
        self.config = RunConfig(
            rollout=RolloutConfig(
                num_generations=NUM_GENERATIONS,
                max_new_tokens=200,
                max_prompt_tokens=2000,
                resample_error_records=fails_every is not None,
                max_task_attempts=100,
            ),
            inference=InferenceConfig(context_length=4000),
        )
        self.fails_every = fails_every
        self.num_requests = 0
        self.settled_fences: set[int] = set()
        agent = Agent(
            chat=chat,
            client=ScriptedEngine(model_dir, self.reply),
            toolbox=FunctionToolbox([add], recovery=Recovery.STATELESS),
            journal=self.store,
            commit_turn=lambda record, turn: self.store.commit_turn(record, turn),
            rollout=self.config.rollout,
            inference=self.config.inference,
            tool_timeout_s=5.0,
            clock=lambda: datetime.now(UTC),
        )
        self.runner = GroupRunner(
            config=self.config, store=self.store, agent=agent, sampler_class=MCPSampler, slots=asyncio.Semaphore(8)
        )

    def reply(self, context: str, depth: int) -> str | BaseException:
        """Different every time, so that no worker repeats another's work by chance."""
        self.num_requests += 1
        if self.fails_every is not None and self.num_requests % self.fails_every == 0:
            return EngineError("down", kind=EngineErrorKind.REJECTED)
        if "<tool_response>" in context:
            return f"<answer>{4 + self.num_requests % 2}</answer>"
        return f"<think>{self.num_requests}</think>{CALL}"

    async def complete(self) -> None:
        """Two workers, until the group is settled and both know."""
        await self.store.insert_tasks([self.task])
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as workers:
            workers.create_task(self.work("a"))
            workers.create_task(self.work("b"))

    async def work(self, owner: str) -> None:
        """Claim and run, again and again; a refusal only ends that try."""
        while await self.store.get_settlement(self.task.id) is None:
            claims = await self.store.claim_tasks(split="train", owner=owner, lease_s=3600.0, limit=1)
            if not claims:
                await asyncio.sleep(0)
                continue
            self.points.live = claims[0]
            is_settled = False
            try:
                await self.runner.run(claims[0])
                is_settled = True
            except* StaleClaimError:
                pass
            if is_settled:
                self.settled_fences.add(claims[0].fence)

    async def check(self) -> None:
        """Exactly one of everything, and all of it consistent."""
        records = sorted(await self.store.list_records(task_id=self.task.id), key=lambda record: record.generation)
        assert [record.id for record in records] == [f"{self.task.id}/g{k}" for k in range(NUM_GENERATIONS)]
        assert all(record.is_final for record in records)
        assert len(self.settled_fences) == 1
        settlement = await self.store.get_settlement(self.task.id)
        assert settlement is not None
        scored = {record.id: record.score for record in records if is_scored(record)}
        assert settlement.rewards == settlement.scores == scored
        expected, rows = await self.settle_again(records)
        assert settlement == expected
        assert_equal_rows(await self.store.load_sequences([row.id for row in rows]), rows)
        (state,) = await self.store.find_tasks([self.task.id])
        assert [row.id for row in state.sequences] == [row.id for row in rows]
        stored = [row for row in await self.store.list_sequences(split="train") if row.startswith(f"{self.task.id}/")]
        assert stored == sorted(row.id for row in rows)

    async def settle_again(self, records: list[Record]) -> tuple[GroupSettlement, list[DBRecordData]]:
        """The decision, from what the store holds."""
        turns: dict[str, list[Turn]] = {record.id: await self.store.load_turns(record) for record in records}
        return settle_group(self.task, records, turns, algo=self.config.algo, min_turns=0)


def assert_equal_rows(stored: list[DBRecordData], expected: list[DBRecordData]) -> None:
    for one, other in zip(stored, expected, strict=True):
        assert (one.id, one.record_id, one.reward, one.turn_ids) == (
            other.id,
            other.record_id,
            other.reward,
            other.turn_ids,
        )
        assert np.array_equal(one.token_ids, other.token_ids)
        assert np.array_equal(one.advantages, other.advantages)
        assert np.array_equal(one.loss_mask, other.loss_mask)


async def complete_with(
    store: Store,
    model_dir: Path,
    chat: ChatFormat,
    *,
    losing: frozenset[int],
    seed: int = 0,
    fails_every: int | None = None,
) -> Points:
    """One group, brought to its end with the claim lost at the given points; checked."""
    points = Points(store=store, losing=losing, rng=random.Random(seed))
    with pytest.MonkeyPatch.context() as monkeypatch:
        hook(points, monkeypatch)
        group = Group(points, model_dir=model_dir, chat=chat, fails_every=fails_every)
        await group.complete()
    await group.check()
    report = await audit_run(store, config=group.config, run_dir=None)
    assert [finding for result in report.results for finding in result.findings] == []
    return points


@pytest.mark.parametrize("fails_every", [None, 3], ids=["engine works", "engine fails"])
async def test_a_claim_lost_at_any_point_leaves_one_settlement_of_the_final_records(
    store: Store, model_dir: Path, fails_every: int | None
) -> None:
    chat = ChatFormat.load(model_dir)
    calm = await complete_with(store, model_dir, chat, losing=frozenset(), fails_every=fails_every)
    assert calm.num_lost == 0
    points_to_try = random.Random(0).sample(range(calm.num_passed), min(calm.num_passed, MOST_POINTS_TRIED))
    num_lost = 0
    for number in points_to_try:
        losing = frozenset({number})
        points = await complete_with(store, model_dir, chat, losing=losing, seed=number, fails_every=fails_every)
        num_lost += points.num_lost
    assert num_lost > len(points_to_try) / 2  # most points really took a claim away


@pytest.mark.parametrize("fails_every", [None, 3], ids=["engine works", "engine fails"])
async def test_claims_lost_again_and_again_leave_one_settlement_of_the_final_records(
    store: Store, model_dir: Path, fails_every: int | None
) -> None:
    chat = ChatFormat.load(model_dir)
    num_lost, num_runs = 0, 60 if isinstance(store, MemoryStore) else 6
    for seed in range(num_runs):
        losing = frozenset(random.Random(seed).sample(range(60), 8))
        points = await complete_with(store, model_dir, chat, losing=losing, seed=seed, fails_every=fails_every)
        num_lost += points.num_lost
    assert num_lost > 2 * num_runs
