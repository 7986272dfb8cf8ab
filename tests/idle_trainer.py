"""The sampler's and the trainer's sides on one in-memory store: a real worker and planner, an idle optimizer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from typing import Any, cast

from agentrl.chat import ChatFormat
from agentrl.config import RunConfig
from agentrl.protocols import TrainStore
from agentrl.rollout.worker import run_sampler
from agentrl.store import MemoryStore
from agentrl.tools import FunctionToolbox
from agentrl.train.feed import StoreFeed
from agentrl.train.planner import StepPlanner
from agentrl.types import InferenceService, PolicyVersion, Recovery, ServiceStatus, StepStatus, Task, TrainStep
from factories import make_task
from scripted_engine import ScriptedEngine

CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
LIMIT_S = 30.0


def add(a: int, b: int) -> str:
    """Sum of two integers."""
    return str(a + b)


class Solver:
    """A script of two turns. Of any two Records one is right, so every group has signal."""

    def __init__(self) -> None:
        self.num_answers = 0

    def __call__(self, context: str, depth: int) -> str:
        if not has_result(context):
            return CALL
        self.num_answers += 1
        return f"<answer>{4 + self.num_answers % 2}</answer>"


def has_result(context: str) -> bool:
    """Whether a tool has answered already."""
    return "<tool_response>" in context


class LoopFeed:
    """A StoreFeed to the store on the test's own loop, for a planner on another thread."""

    def __init__(self, store: MemoryStore, loop: asyncio.AbstractEventLoop) -> None:
        self._store = store
        self._loop = loop

    def call(self, operation: Callable[[TrainStore], Coroutine[Any, Any, Any]]) -> Any:
        """The result of one store operation."""
        return asyncio.run_coroutine_threadsafe(operation(self._store), self._loop).result(LIMIT_S)


class Trainer:
    """Plans, pretends to train, commits, publishes; `serve` says what the engine does with a new version."""

    def __init__(self, config: RunConfig, store: MemoryStore, engine: ScriptedEngine) -> None:
        feed = cast("StoreFeed", LoopFeed(store, asyncio.get_running_loop()))
        self.planner = StepPlanner(feed, config=config, num_ranks=1, report=lambda phase, step: None)
        self.store = store
        self.engine = engine
        self.serve: Callable[[int], None] = lambda version: setattr(engine, "version", version)

    async def publish(self, version: int) -> None:
        """Announce weights; the service reports them as loaded."""
        await self.store.publish_policy(PolicyVersion(version=version, path=""))
        self.serve(version)
        service = InferenceService(id="s", base_url="", status=ServiceStatus.UP, policy_version=version)
        await self.store.put_service(service)

    async def steps(self, count: int, *, first: int = 1) -> list[TrainStep]:
        """Train `count` steps; fails if that takes too long."""
        done = []
        async with asyncio.timeout(LIMIT_S):
            await self.publish(first - 1)
            for step in range(first, first + count):
                plan = await asyncio.to_thread(self.planner.plan, step)
                totals = {
                    "num_trained_tokens": float(sum(row.num_trained_tokens for row in plan.sequences)),
                    "num_tokens": float(sum(row.num_tokens for row in plan.sequences)),
                    "num_sequences": float(len(plan.sequences)),
                }
                metrics = {**plan.entry.metrics, **totals}
                await self.store.commit_step(replace(plan.entry, status=StepStatus.COMMITTED, metrics=metrics))
                await self.publish(step)
                done.append(plan.entry)
        return done


async def store_with(num_tasks: int) -> MemoryStore:
    store = MemoryStore()
    tasks: list[Task] = [make_task(f"q{number}", answer="5") for number in range(num_tasks)]
    await store.insert_tasks(tasks)
    return store


@contextlib.asynccontextmanager
async def sampler(config: RunConfig, store: MemoryStore, engine: ScriptedEngine) -> AsyncIterator[None]:
    """A running sampler process; stopped in an orderly way at the end."""
    stop = asyncio.Event()
    chat = ChatFormat.load(engine.model_dir)
    running = asyncio.create_task(
        run_sampler(
            config,
            store=store,
            toolbox=FunctionToolbox([add], recovery=Recovery.STATELESS),
            client=engine,
            chat=chat,
            stop=stop,
        )
    )
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait_for(running, LIMIT_S)
