"""One run of a fleet inside one sampler process: its worker, what it could claim now, and what it has used.

The worker is the same as of a process that samples a single run: leases, heartbeats, reaper and group runner. What is
different is who decides when it claims: `rollout/fleet.py`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta

from agentrl.algo.admission import groups_to_admit
from agentrl.errors import BudgetSpentError
from agentrl.fleets import FleetRunStore, FleetUsage
from agentrl.pacing import longest_silence_s
from agentrl.rollout.parts import RunParts
from agentrl.rollout.stopping import tell_budget_spent, tell_sampling_stopped
from agentrl.rollout.worker import SamplerWorker, outstanding
from agentrl.types import InferenceService, Record, ServiceStatus, TaskStatus, Turn

logger = logging.getLogger(__name__)

TRAIN_SPLIT = "train"
UNSERVED_GRACE_S = 2.0  # a service that fails for a moment keeps its groups
FLUSH_S = 1.0


@dataclass(slots=True, kw_only=True)
class Membership:
    """A run that this process samples for. `num_claimable` and `is_served` are as of the last `look`."""

    name: str
    parts: RunParts
    worker: SamplerWorker
    fleet: FleetRunStore
    key: str  # of this process among the run's usage entries
    usage: FleetUsage
    num_claimable: int = 0
    is_served: bool = False
    _unserved_since: float | None = None
    _written: FleetUsage = field(default_factory=FleetUsage)
    _written_at: float = float("-inf")

    @property
    def num_records(self) -> int:
        """Records of the groups in flight."""
        return sum(claim.task.num_generations for claim, _ in self.worker.groups.values())

    @property
    def running(self) -> list[asyncio.Task[None]]:
        """The groups in flight."""
        return [group for _, group in self.worker.groups.values()]

    async def look(self) -> None:
        """Write what was used. Read what could be claimed and whether it is served; give back what nobody serves.

        Raises BudgetSpentError once the run's `budget_usd` is spent and its groups have ended.
        """
        await self.flush()
        self.worker.check_refusal()
        num_pending = await self._count()
        if self.num_claimable and not num_pending:
            await self.worker.refill()
            self.num_claimable = 0  # until the next look
        if not self.num_claimable and not self.worker.groups:
            return  # whether it is served does not matter now
        services = await self._living_services()
        oldest = 0 if self.parts.config.algo.max_staleness else await self._newest_version()
        up = [service for service in services if service.status is ServiceStatus.UP]
        self.is_served = any(service.policy_version >= oldest for service in up)
        await self._give_back_unserved(has_service=bool(services))

    async def _count(self) -> int:
        """Return expired claims to the queue and set `num_claimable`; how many Tasks are pending.

        With none, a `num_claimable` of 1 says that the next epoch may be enqueued.
        """
        algo = self.parts.config.algo
        counts = await self.worker.look_over()
        num_pending = counts.get(TaskStatus.PENDING, 0)
        self.num_claimable = groups_to_admit(
            num_outstanding=outstanding(counts),
            num_free=max(num_pending, 1),
            tasks_per_step=algo.tasks_per_step,
            max_staleness=algo.max_staleness,
        )
        return num_pending

    async def claim(self, *, share: float, budget_tasks: int | None) -> bool:
        """Claim one Task and start its group; whether there was one.

        The charge is written first, so that a budget of Tasks is never exceeded, and taken back if nothing came of it.
        A Task is charged once: it is free if it was claimed before and given back.
        """
        if self.worker.refusal is not None or not await self._count() or not self.num_claimable:
            return False
        await self._charge(1, share=share)
        if budget_tasks is not None and await self._num_charged() > budget_tasks:
            await self._charge(-1, share=share)
            return False
        known = set(self.worker.groups)
        await self.worker.claim(1)
        claims = [claim for task_id, (claim, _) in self.worker.groups.items() if task_id not in known]
        if not claims or claims[0].fence > 1:
            await self._charge(-1, share=share)
        return bool(claims)

    async def commit_turn(self, record: Record, turn: Turn) -> Record:
        """Make a turn durable and count its tokens."""
        header = await self.parts.store.commit_turn(record, turn)
        self.usage = replace(self.usage, num_tokens=self.usage.num_tokens + len(turn.tokens.completion_ids))
        return header

    async def flush(self, *, at_once: bool = False) -> None:
        """Write what was used since the last time, about once a second."""
        if self.usage != self._written and (at_once or time.monotonic() - self._written_at >= FLUSH_S):
            await self._write(self.usage)

    async def tell_run(self, stopped: str | None) -> None:
        """Keep in the run's own database why nothing more is sampled; None: something is."""
        await tell_sampling_stopped(self.parts.store, stopped)

    async def tell_budget_spent(self, refusal: BudgetSpentError) -> None:
        """The same where the run's own money is spent, unless another sampler goes on."""
        await self.worker.say_stopped()
        heartbeat_s = self.parts.config.store.heartbeat_s
        await tell_budget_spent(self.parts.store, refusal, heartbeat_s=heartbeat_s)

    async def _newest_version(self) -> int:
        policy = await self.parts.store.latest_policy()
        return 0 if policy is None else policy.version

    async def _living_services(self) -> list[InferenceService]:
        """The services that do something for the run: UP or DRAINING, and not silent for long."""
        working = {ServiceStatus.UP, ServiceStatus.DRAINING}
        services = [s for s in await self.parts.store.list_services() if s.status in working]
        if not services:
            return []
        since = await self.parts.store.server_time() - timedelta(
            seconds=longest_silence_s(self.parts.config.store.heartbeat_s)
        )
        return [service for service in services if service.heartbeat_at is not None and service.heartbeat_at > since]

    async def _give_back_unserved(self, *, has_service: bool) -> None:
        """A run whose weights no service has for a while frees its places; its turns are continued later."""
        if has_service or not self.worker.groups:
            self._unserved_since = None
            return
        now = time.monotonic()
        if self._unserved_since is None:
            self._unserved_since = now
        elif now - self._unserved_since > UNSERVED_GRACE_S:
            logger.info("run %s: no service has its weights; %d groups go back", self.name, len(self.worker.groups))
            await self.worker.give_back()

    async def _num_charged(self) -> int:
        runs = await self.fleet.list_fleet_runs()
        return next((run.num_tasks for run in runs if run.name == self.name), 0)

    async def _charge(self, num_tasks: int, *, share: float) -> None:
        usage = self.usage
        virtual_time = usage.virtual_time + num_tasks / share
        await self._write(replace(usage, num_tasks=usage.num_tasks + num_tasks, virtual_time=virtual_time))

    async def _write(self, usage: FleetUsage) -> None:
        self.usage = self._written = usage
        self._written_at = time.monotonic()
        await self.fleet.put_fleet_usage(self.name, member=self.key, usage=usage)


@asynccontextmanager
async def joined(
    name: str,
    *,
    parts: RunParts,
    fleet: FleetRunStore,
    key: str,
    usage: FleetUsage,
    slots: asyncio.Semaphore,
) -> AsyncIterator[Membership]:
    """A run's worker at work while inside; afterwards its unfinished Tasks are given back.

    `usage` is what this process has used for the run so far; `slots` bounds its Records in flight over all runs.
    """
    worker = SamplerWorker.build(
        parts.config, split=TRAIN_SPLIT, store=parts.store, toolbox=parts.toolbox, client=parts.client, chat=parts.chat,
        sampler_class=parts.sampler_class, scoring=parts.scoring, browser=parts.browser,
    )  # fmt: skip
    member = Membership(name=name, parts=parts, worker=worker, fleet=fleet, key=key, usage=usage)
    worker.runner.slots = slots
    worker.call_tools_with(parts.caller)
    worker.runner.agent = replace(worker.runner.agent, commit_turn=member.commit_turn)
    async with worker.upkeep():
        yield member
    await member.flush(at_once=True)
