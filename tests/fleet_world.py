"""Runs of a fleet for tests: real sampler processes' logic and stores, a scripted engine per run."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.chat import ChatFormat
from agentrl.config import RunConfig
from agentrl.fleets import FleetRun, FleetRunStore
from agentrl.protocols import Store
from agentrl.rollout.fleet import run_fleet_sampler
from agentrl.rollout.parts import RunParts
from agentrl.rollout.spending import PaidClient, Spending
from agentrl.tools import FunctionToolbox
from agentrl.types import InferenceService, Recovery, ServiceStatus, TaskStatus
from factories import make_task
from idle_trainer import Solver, add
from scripted_engine import ScriptedEngine

LIMIT_S = 60.0


def make_config(run_name: str, *, tasks_per_step: int = 1000, num_generations: int = 2) -> RunConfig:
    """A run whose trainer is never the one that is waited for, unless `tasks_per_step` is small."""
    values = {
        "run": {"run_name": run_name},
        "store": {"heartbeat_s": 0.1, "lease_s": 2.0},
        "rollout": {
            "num_generations": num_generations, "max_new_tokens": 200, "max_prompt_tokens": 2000, "num_train_epochs": 1,
        },
        "inference": {"context_length": 4000},
        "algo": {"tasks_per_step": tasks_per_step, "advantage": "group_mean", "max_staleness": 0},
    }  # fmt: skip
    return RunConfig.model_validate(values)


@dataclass(kw_only=True)
class FleetWorld:
    """Stores and engines of the runs, and how samplers of the fleet are started."""

    model_dir: Path
    fleet: FleetRunStore
    max_records: int = 8
    poll_s: float = 0.005  # how often the test looks; a real database answers slower
    stores: dict[str, Store] = field(default_factory=dict)
    engines: dict[str, ScriptedEngine] = field(default_factory=dict)
    configs: dict[str, RunConfig] = field(default_factory=dict)
    spending: dict[str, Spending] = field(default_factory=dict)  # of runs that pay for their tokens

    async def add_run(
        self, run: FleetRun, store: Store, *, num_tasks: int, tasks_per_step: int = 1000, delay_s: float = 0.0
    ) -> None:
        """A run with pending Tasks, served and in the fleet; a completion of its engine takes `delay_s`."""
        await store.insert_tasks([make_task(f"q{number}", answer="5") for number in range(num_tasks)])
        self.stores[run.name] = store
        self.engines[run.name] = SlowEngine(self.model_dir, delay_s=delay_s)
        self.configs[run.name] = make_config(run.name, tasks_per_step=tasks_per_step)
        await self.set_served(run.name, ServiceStatus.UP)
        await self.fleet.put_fleet_run(run)

    async def set_served(self, run_name: str, status: ServiceStatus) -> None:
        """What the run's inference service says of itself."""
        service = InferenceService(id="s", base_url="http://scripted", status=status, policy_version=0)
        await self.stores[run_name].put_service(service)

    @contextlib.asynccontextmanager
    async def heartbeats(self) -> AsyncIterator[None]:
        """Services that go on saying that they are up, for tests that take longer than one may be silent."""

        async def beat() -> None:
            while True:
                for name in self.stores:
                    await self.set_served(name, ServiceStatus.UP)
                await asyncio.sleep(2)

        beating = asyncio.create_task(beat())
        try:
            yield
        finally:
            beating.cancel()

    @contextlib.asynccontextmanager
    async def open_run(self, run: FleetRun) -> AsyncIterator[RunParts]:
        yield RunParts(
            config=self.configs[run.name],
            store=self.stores[run.name],
            toolbox=FunctionToolbox([add], recovery=Recovery.STATELESS),
            client=PaidClient(self.engines[run.name], spending=self.spending.get(run.name, Spending())),
            chat=ChatFormat.load(self.model_dir),
        )

    @contextlib.asynccontextmanager
    async def samplers(self, count: int) -> AsyncIterator[None]:
        """Running samplers of the fleet; stopped in an orderly way at the end."""
        stop = asyncio.Event()
        running = [
            asyncio.create_task(
                run_fleet_sampler(self.fleet, open_run=self.open_run, max_records=self.max_records, stop=stop)
            )
            for _ in range(count)
        ]
        try:
            yield
        finally:
            stop.set()
            async with asyncio.timeout(LIMIT_S):
                await asyncio.gather(*running)

    async def settled(self) -> Counter[str]:
        """Settled Tasks of every run."""
        counts = Counter[str]()
        for name, store in self.stores.items():
            counts[name] = (await store.count_tasks(split="train")).get(TaskStatus.SETTLED, 0)
        return counts

    async def settled_when(self, is_reached: Callable[[Counter[str]], bool]) -> Counter[str]:
        """The settled Tasks as soon as they are enough."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                counts = await self.settled()
                if is_reached(counts):
                    return counts
                await asyncio.sleep(self.poll_s)

    async def granted_when(self, is_reached: Callable[[Counter[str]], bool]) -> Counter[str]:
        """The Tasks the fleet has claimed for each run, as soon as they are enough."""
        runs = await self.runs_when(lambda runs: is_reached(_granted(runs)))
        return _granted(runs)

    async def runs_when(self, is_reached: Callable[[dict[str, FleetRun]], bool]) -> dict[str, FleetRun]:
        """The fleet's documents as soon as they say so."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                runs = {run.name: run for run in await self.fleet.list_fleet_runs()}
                if is_reached(runs):
                    return runs
                await asyncio.sleep(self.poll_s)


def _granted(runs: dict[str, FleetRun]) -> Counter[str]:
    return Counter({name: run.num_tasks for name, run in runs.items()})


class SlowEngine(ScriptedEngine):
    """Solves every problem in two turns, each of which takes a while."""

    def __init__(self, model_dir: Path, *, delay_s: float) -> None:
        super().__init__(model_dir, Solver())
        self.delay_s = delay_s

    async def generate(self, request):  # type: ignore[no-untyped-def]  # as the parent
        """The completion, later."""
        await asyncio.sleep(self.delay_s)
        reply = await super().generate(request)
        self.requests.clear()  # their prefixes are of no interest here, and comparing them is quadratic
        return reply


async def until(is_reached: Callable[[], Awaitable[bool]]) -> None:
    """Poll, bounded."""
    async with asyncio.timeout(LIMIT_S):
        while not await is_reached():
            await asyncio.sleep(0.005)
