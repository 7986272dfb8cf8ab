"""A run in virtual time: the real admission rule, planner and in-memory store around engines with random latencies.

    slots ── a group starts: groups_to_admit(...) groups may be claimed ──► runs for a log-normal time ──► settled
                                                                                                              │
    trainer ── StepPlanner.plan(step): waits, drops stale groups, takes the oldest ◄──────────────────────────┘
            └─ trains for `train_time`, commits, publishes version `step`: what runs continues on the new weights

Only the engines, the optimizer and the passage of time are made up, so the staleness, the waiting and the losses
measured here are those of the rules. Equal arguments give equal results.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar, cast

import numpy as np

from agentrl.algo.admission import groups_to_admit
from agentrl.config import AlgoConfig, RolloutConfig, RunConfig
from agentrl.rollout.worker import count_outstanding
from agentrl.store import MemoryStore
from agentrl.train.feed import StoreFeed
from agentrl.train.planner import StepPlanner
from agentrl.types import (
    DBRecordData,
    GroupOutcome,
    GroupSettlement,
    PolicyVersion,
    StepStatus,
    Task,
    TaskClaim,
)

Result = TypeVar("Result")
SPLIT = "train"
START = datetime(2026, 1, 1, tzinfo=UTC)
PENDING_KEPT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One run. Times are in units; a group has one generation."""

    max_staleness: int
    one_step_off: bool = False  # sample exactly the next batch while one is trained, instead of by capacity
    sigma: float = 0.3
    median_latency: float = 12.0
    train_time: float = 20.0
    max_trained_count: int = 1
    retrained_interval: int = 1
    num_slots: int = 32
    tasks_per_step: int = 32
    num_steps: int = 100
    num_warmup_steps: int = 10  # not measured
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What a run did after its warm-up."""

    time_per_step: float
    idle_share: float  # of the trainer's time
    staleness: dict[int, int]  # policy versions -> trained groups, by their oldest token
    num_aged_out: int  # groups dropped as stale
    num_trained: int
    steps_of_groups: dict[str, tuple[int, ...]]  # every group that was trained, and when; warm-up included

    @property
    def aged_out_share(self) -> float:
        """Of all groups that were sampled to their end."""
        return self.num_aged_out / max(1, self.num_aged_out + self.num_trained)


class DirectFeed:
    """A StoreFeed without a thread: MemoryStore never suspends."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def call(self, operation: Callable[[MemoryStore], Coroutine[Any, Any, Result]]) -> Result:
        """The result of one store operation."""
        return finish(operation(self._store))

    def load(self, ids: Sequence[str]) -> list[DBRecordData]:
        """Rows by id."""
        return finish(self._store.load_sequences(ids))


def finish(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return cast("Result", stop.value)
    raise AssertionError(f"{coroutine} waits for something")


@dataclass
class Simulation:
    """The state of a run. `running` is ordered by the time of completion."""

    scenario: Scenario
    now: float = 0.0
    version: int = 0
    running: list[tuple[float, int, TaskClaim, int]] = field(default_factory=list)  # ends at, order, claim, version
    sequence: Any = field(default_factory=itertools.count)
    is_training: bool = False

    def __post_init__(self) -> None:
        self.store = MemoryStore(clock=lambda: START + timedelta(seconds=self.now))
        self.rng = np.random.default_rng(self.scenario.seed)
        self.num_tasks = self.num_claimed = 0

    def run(self) -> Measurement:
        """All steps; measured from the end of the warm-up."""
        scenario = self.scenario
        planner = StepPlanner(
            cast("StoreFeed", DirectFeed(self.store)),
            config=self._config(),
            num_ranks=1,
            report=lambda phase, step: None,
            sleep=lambda pause_s: self.next_event(),
        )
        staleness: Counter[int] = Counter()
        trained: dict[str, list[int]] = {}
        measured_from = 0.0
        num_aged_out_before = 0
        self.admit()
        for step in range(1, scenario.num_steps + 1):
            plan = planner.plan(step)
            rows = finish(self.store.load_sequences(plan.entry.sequence_ids))
            for row in rows:
                trained.setdefault(row.task_id, []).append(step)
            self.train(plan.entry.step)
            finish(self.store.commit_step(replace(plan.entry, status=StepStatus.COMMITTED)))
            finish(self.store.publish_policy(PolicyVersion(version=step, path="")))
            self.version = step
            self.admit()
            if step > scenario.num_warmup_steps:
                staleness.update(plan.entry.policy_version - row.summary.min_policy_version for row in rows)
            if step == scenario.num_warmup_steps:
                measured_from, num_aged_out_before = self.now, self.num_aged_out()
        num_measured = scenario.num_steps - scenario.num_warmup_steps
        time_per_step = (self.now - measured_from) / num_measured
        return Measurement(
            time_per_step=time_per_step,
            idle_share=1 - scenario.train_time / time_per_step,
            staleness=dict(sorted(staleness.items())),
            num_aged_out=self.num_aged_out() - num_aged_out_before,
            num_trained=staleness.total(),
            steps_of_groups={task_id: tuple(steps) for task_id, steps in trained.items()},
        )

    def train(self, step: int) -> None:
        """Let the trainer work on a planned step while groups go on."""
        self.is_training = True
        self.admit()
        done_at = self.now + self.scenario.train_time
        while self.running and self.running[0][0] <= done_at:
            self.next_event()
        self.now = done_at
        self.is_training = False

    def next_event(self) -> None:
        """Advance to the next completion: the group is settled, its slot is free."""
        if not self.running:
            raise AssertionError(f"deadlock at {self.now}: nothing runs and the trainer waits")
        self.now, _, claim, version = heapq.heappop(self.running)
        settlement = GroupSettlement(
            task_id=claim.task.id,
            outcome=GroupOutcome.TRAINABLE,
            rewards={f"{claim.task.id}/g0": 1.0},
            advantages={f"{claim.task.id}/g0": 1.0},
        )
        finish(self.store.settle_task(claim, settlement, [self._row(claim, first=version)]))
        self.admit()

    def admit(self) -> None:
        """Start as many groups as the rule allows."""
        self._keep_tasks_pending()
        limit = self._capacity()
        for claim in finish(self.store.claim_tasks(split=SPLIT, owner="w", lease_s=1e9, limit=limit)) if limit else []:
            latency = self.scenario.median_latency * float(np.exp(self.scenario.sigma * self.rng.standard_normal()))
            self.num_claimed += 1
            heapq.heappush(self.running, (self.now + latency, next(self.sequence), claim, self.version))

    def num_aged_out(self) -> int:
        """Groups that were dropped as stale so far."""
        states = finish(self.store.find_tasks(finish(self.store.list_task_ids())))
        return sum(state.drop_reason == "stale" for state in states)

    def _capacity(self) -> int:
        scenario = self.scenario
        outstanding = finish(count_outstanding(self.store, split=SPLIT))
        if scenario.one_step_off:
            is_next_batch_there = outstanding > (scenario.tasks_per_step if self.is_training else 0)
            return 0 if is_next_batch_there else scenario.tasks_per_step
        return groups_to_admit(
            num_outstanding=outstanding,
            num_free=scenario.num_slots - len(self.running),
            tasks_per_step=scenario.tasks_per_step,
            max_staleness=scenario.max_staleness,
        )

    def _keep_tasks_pending(self) -> None:
        if self.num_tasks - self.num_claimed >= self.scenario.tasks_per_step:
            return
        names = range(self.num_tasks, self.num_tasks + PENDING_KEPT)
        finish(self.store.insert_tasks([_task(name) for name in names]))
        self.num_tasks += PENDING_KEPT

    def _row(self, claim: TaskClaim, *, first: int) -> DBRecordData:
        """Two sampled tokens: the group's first, and one of the weights it ended with."""
        record_id = f"{claim.task.id}/g0"
        return DBRecordData(
            id=f"{record_id}/s0",
            task_id=claim.task.id,
            record_id=record_id,
            split=SPLIT,
            token_ids=np.array([1, 2], dtype=np.int32),
            loss_mask=np.array([True, True]),
            advantages=np.ones(2, dtype=np.float32),
            behaviour_logprobs=np.zeros(2, dtype=np.float32),
            policy_versions=np.array([first, self.version], dtype=np.int32),
            reward=1.0,
        )

    def _config(self) -> RunConfig:
        scenario = self.scenario
        return RunConfig(
            rollout=RolloutConfig(num_generations=1),
            algo=AlgoConfig(
                advantage="none",
                max_staleness=scenario.max_staleness,
                tasks_per_step=scenario.tasks_per_step,
                max_trained_count=scenario.max_trained_count,
                retrained_interval=scenario.retrained_interval,
            ),
        )


def _task(number: int) -> Task:
    name = f"q{number}"
    return Task(id=f"{SPLIT}:0:{name}", item_id=name, split=SPLIT, epoch=0, query="?", answer="!", num_generations=1)


def modes(**settings: Any) -> dict[str, Scenario]:
    """The modes that are compared, by name."""
    return {
        "sync": Scenario(max_staleness=0, **settings),
        "one step off": Scenario(max_staleness=1, one_step_off=True, **settings),
        **{f"async K = {bound}": Scenario(max_staleness=bound, **settings) for bound in (1, 2, 4)},
    }


def measure(scenario: Scenario) -> Measurement:
    """Run one scenario."""
    return Simulation(scenario).run()


def table(measured: Sequence[tuple[float, str, Measurement]]) -> str:
    """(sigma, mode, measurement) as Markdown; speed-ups are against `sync` of the same sigma."""
    lines = [
        "| sigma | mode | time per step | against sync | trainer idle | staleness 0 / 1 / 2 / 3 / 4 | aged out |",
        "|---|---|---|---|---|---|---|",
    ]
    sync = {sigma: each.time_per_step for sigma, mode, each in measured if mode == "sync"}
    for sigma, mode, each in measured:
        shares = " / ".join(f"{each.staleness.get(age, 0) / each.num_trained:.0%}" for age in range(5))
        lines.append(
            f"| {sigma} | {mode} | {each.time_per_step:.1f} | {sync[sigma] / each.time_per_step:.2f}x "
            f"| {each.idle_share:.0%} | {shares} | {each.aged_out_share:.1%} |"
        )
    return "\n".join(lines)
