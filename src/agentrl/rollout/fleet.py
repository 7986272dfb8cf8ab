"""The sampler process of a fleet: one set of places for rollouts, shared by several runs.

    read the fleet's runs        join the new ones; runs that left give their Tasks back; spent budgets stop
    look at every run            claimable Tasks? admission? does a service have its weights?
    while a place is free        algo.fair_share chooses a run ──► it claims one Task ──► GroupRunner.run
    wait                         for a group to end, at most a second

What a run has used is in the fleet's documents, so its share holds over all sampler processes of the fleet. A failure
of one run (its database, its tools) sets that run aside for a while, in this process; the others go on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from uuid import uuid4

from agentrl.algo.fair_share import Contender, choose_run, lifted
from agentrl.errors import AgentRLError, BudgetSpentError, StoreError, UserError
from agentrl.fleets import FleetRun, FleetRunStatus, FleetRunStore, FleetUsage
from agentrl.pacing import Pace
from agentrl.rollout.membership import Membership, joined
from agentrl.rollout.parts import RunParts
from agentrl.rollout.worker import LONGEST_POLL_S, SHORTEST_POLL_S

logger = logging.getLogger(__name__)

LOOK_S = 0.25
RETRY_S = 10.0
CLAIM_GRACE_S = 2.0  # a claim that finds nothing takes back what it charged
_FAILURES = (AgentRLError, ExceptionGroup, OSError)  # of one run: its database, tools, files

OpenRun = Callable[[FleetRun], AbstractAsyncContextManager[RunParts]]


async def run_fleet_sampler(
    fleet: FleetRunStore,
    *,
    open_run: OpenRun,
    max_records: int,
    stop: asyncio.Event,
) -> None:
    """Sample for the fleet's runs until `stop` is set; then give unfinished Tasks back and return.

    `max_records` bounds the Records in flight, over all runs.
    """
    sampler = FleetSampler(fleet=fleet, open_run=open_run, max_records=max_records)
    async with sampler.members_closed():
        await sampler.sample_until(stop)


@dataclass(slots=True, kw_only=True)
class FleetSampler:
    """The state of one sampler process of a fleet."""

    fleet: FleetRunStore
    open_run: OpenRun
    max_records: int
    key: str = field(default_factory=lambda: uuid4().hex[:16])  # no host name: field names must not hold dots
    members: dict[str, tuple[Membership, AsyncExitStack]] = field(default_factory=dict)
    retry_at: dict[str, float] = field(default_factory=dict)
    told: dict[str, str | None] = field(default_factory=dict)  # what the runs' own databases say of a stop
    runs: dict[str, FleetRun] = field(default_factory=dict)  # as of the last look, with what was granted since
    spent_since: dict[str, float] = field(default_factory=dict)
    looked_at: float = float("-inf")
    slots: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self.slots = asyncio.Semaphore(self.max_records)

    @asynccontextmanager
    async def members_closed(self) -> AsyncIterator[None]:
        """Leave every run at the end of the body."""
        try:
            yield
        finally:
            for name in list(self.members):
                await self._leave(name)

    async def sample_until(self, stop: asyncio.Event) -> None:
        """Grant places to runs as they become free."""
        pace = Pace(shortest_s=SHORTEST_POLL_S, longest_s=LONGEST_POLL_S)
        while not stop.is_set():
            if await self._round():
                pace.reset()
            await self._wait(stop, timeout_s=pace.pause())

    async def _round(self) -> int:
        """Look at everything if it is time to, and grant what is free. Returns how many groups were started."""
        if time.monotonic() - self.looked_at >= LOOK_S:
            self.looked_at = time.monotonic()
            try:
                await self._look()
            except StoreError as error:  # what runs goes on, and the next look may succeed
                logger.warning("the fleet's documents cannot be read or written: %s", error)
        for name, (member, _) in list(self.members.items()):
            try:
                member.worker.collect()
            except _FAILURES as error:
                await self._set_aside(name, error)
        return await self._grant()

    async def _look(self) -> None:
        """Read the fleet's documents and every run; join, leave, stop and schedule as they say."""
        self.runs = {run.name: await self._within_budget(run) for run in await self.fleet.list_fleet_runs()}
        await self._join_and_leave()
        names = list(self.members)
        outcomes = await asyncio.gather(*(self.members[name][0].look() for name in names), return_exceptions=True)
        for name, outcome in zip(names, outcomes, strict=True):
            if isinstance(outcome, BudgetSpentError):
                await self._end_spending(name, outcome)
            elif isinstance(outcome, _FAILURES):
                await self._set_aside(name, outcome)
            elif outcome is not None:
                raise outcome
        for name, virtual_time in lifted(self._contenders()).items():
            run = self.runs[name]
            offset = (run.offset or 0.0) + virtual_time - run.virtual_time
            await self.fleet.raise_fleet_offset(name, offset=offset)
            self.runs[name] = replace(run, offset=offset)

    async def _within_budget(self, run: FleetRun) -> FleetRun:
        """The run, stopped if a budget of it is used up, active again if that was raised."""
        spent = run.spent_budget
        if run.status is FleetRunStatus.ACTIVE and self._stays_spent(run):
            target = FleetRunStatus.STOPPED
        elif run.status is FleetRunStatus.STOPPED and spent is None:
            target = FleetRunStatus.ACTIVE
        else:
            return run
        logger.info("run %s is %s: %s", run.name, target.value, spent or "its budget was raised")
        await self.fleet.move_fleet_run(run.name, source=run.status, target=target, reason=spent or "")
        return replace(run, status=target, reason=spent or "")

    def _stays_spent(self, run: FleetRun) -> bool:
        """Whether a budget is used up and not only reserved by a claim: a trainer that is told so ends."""
        if run.spent_budget is None:
            self.spent_since.pop(run.name, None)
            return False
        since = self.spent_since.setdefault(run.name, time.monotonic())
        return time.monotonic() - since >= CLAIM_GRACE_S

    async def _join_and_leave(self) -> None:
        """Make the memberships those the documents ask for."""
        for name in list(self.members):
            run = self.runs.get(name)
            if run is not None and run.status in {FleetRunStatus.ACTIVE, FleetRunStatus.STOPPED}:
                await self._tell(run)
            if name in self.members and self._is_over(run, self.members[name][0]):
                await self._leave(name)
        for name, run in self.runs.items():
            is_due = time.monotonic() >= self.retry_at.get(name, float("-inf"))
            stops_untold = run.status is FleetRunStatus.STOPPED and self.told.get(name) != run.reason
            if (run.status is FleetRunStatus.ACTIVE or stops_untold) and name not in self.members and is_due:
                await self._join(run)

    @staticmethod
    def _is_over(run: FleetRun | None, member: Membership) -> bool:
        """Whether to leave a run: at once when it left, else when its groups have ended."""
        if run is None or run.status is FleetRunStatus.LEFT:
            return True
        return run.status is not FleetRunStatus.ACTIVE and not member.worker.groups

    async def _tell(self, run: FleetRun) -> None:
        """Keep in the run's own database why nothing more is sampled for it, if so."""
        stop = run.reason if run.status is FleetRunStatus.STOPPED else None
        if self.told.get(run.name, "unknown") == stop:
            return
        try:
            await self.members[run.name][0].tell_run(stop)
            self.told[run.name] = stop
        except _FAILURES as error:
            await self._set_aside(run.name, error)

    async def _join(self, run: FleetRun) -> None:
        try:
            async with AsyncExitStack() as opened:
                parts = await opened.enter_async_context(self.open_run(run))
                usage = run.usage.get(self.key, FleetUsage())
                membership = joined(
                    run.name, parts=parts, fleet=self.fleet, key=self.key, usage=usage, slots=self.slots,
                )  # fmt: skip
                member = await opened.enter_async_context(membership)
                self.members[run.name] = (member, opened.pop_all())
        except _FAILURES as error:
            await self._set_aside(run.name, error)
            return
        logger.info("joined run %s", run.name)
        await self._tell(run)

    async def _leave(self, name: str) -> None:
        """Give the run's Tasks back and close what was opened for it."""
        _, opened = self.members.pop(name)
        try:
            await opened.aclose()
        except _FAILURES:
            logger.exception("run %s could not be left in order; its claims expire", name)
        logger.info("left run %s", name)

    async def _end_spending(self, name: str, refusal: BudgetSpentError) -> None:
        """A run whose `budget_usd` is spent: its trainer is told, and it is tried again later."""
        self.told.pop(name, None)  # joining it again takes the reason back
        try:
            await self.members[name][0].tell_budget_spent(refusal)
        except _FAILURES as error:
            logger.warning("run %s: its trainer is not told that the budget is spent: %s", name, error)
        await self._set_aside(name, refusal)

    async def _set_aside(self, name: str, error: Exception) -> None:
        """A failure of one run: try it again later, in this process. The other runs go on."""
        is_explained = isinstance(error, UserError)
        logger.error(
            "run %s is set aside for %.0f s: %s", name, RETRY_S, error, exc_info=None if is_explained else error
        )
        self.retry_at[name] = time.monotonic() + RETRY_S
        if name in self.members:
            await self._leave(name)

    def _contenders(self) -> list[Contender]:
        contenders = []
        for name, run in self.runs.items():
            member = self.members[name][0] if name in self.members else None
            is_active = run.status is FleetRunStatus.ACTIVE and member is not None
            contenders.append(
                Contender(
                    name=name,
                    share=run.share,
                    priority=run.priority,
                    virtual_time=run.virtual_time,
                    wants=is_active and run.spent_budget is None and member is not None and member.num_claimable > 0,
                    is_served=member is not None and member.is_served,
                    is_new=is_active and run.offset is None,
                )
            )
        return contenders

    async def _grant(self) -> int:
        """Start groups while there are places, one Task at a time."""
        num_started = 0
        while (name := choose_run(self._contenders())) is not None:
            member, run = self.members[name][0], self.runs[name]
            if not self._has_place(member.parts.config.rollout.num_generations):
                break
            try:
                claimed = await member.claim(share=run.share, budget_tasks=run.budget_tasks)
            except _FAILURES as error:
                await self._set_aside(name, error)
                continue
            num_started += claimed
            member.num_claimable = member.num_claimable - 1 if claimed else 0
            self.runs[name] = replace(run, usage={**run.usage, self.key: member.usage})
        return num_started

    def _has_place(self, num_generations: int) -> bool:
        """Whether a group fits; always one if the process is idle, however large the group."""
        in_flight = sum(member.num_records for member, _ in self.members.values())
        return in_flight == 0 or in_flight + num_generations <= self.max_records

    async def _wait(self, stop: asyncio.Event, *, timeout_s: float) -> None:
        """Until a group ends, `stop` is set or the time is over."""
        stopping = asyncio.create_task(stop.wait())
        try:
            running = [group for member, _ in self.members.values() for group in member.running]
            await asyncio.wait([stopping, *running], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
