"""The sampler process: claims Tasks while there is capacity, and keeps their leases alive.

    every heartbeat_s      renew all claims; cancel the groups whose claim was lost; report this worker
    every look             count Tasks; return other workers' expired claims to the queue
                           capacity > 0?  claim Tasks ──► one GroupRunner.run each
                           queue empty?   enqueue the next epoch

Capacity is what keeps tokens fresh: at most (max_staleness + 1) steps' worth of groups may be running, settled or in
training at any time (DESIGN L2), so a group is never much older than the bound when it is trained.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from uuid import uuid4

from agentrl.algo.admission import groups_to_admit
from agentrl.chat import ChatFormat
from agentrl.config import RunConfig
from agentrl.errors import BudgetSpentError, StaleClaimError, StoreError
from agentrl.pacing import Pace
from agentrl.protocols import FleetStore, GenerationClient, Store, TaskStore, Toolbox
from agentrl.rollout.agent import Agent
from agentrl.rollout.browse import Browser
from agentrl.rollout.group_scores import GroupScores
from agentrl.rollout.groups import GroupRunner
from agentrl.rollout.parts import RunParts
from agentrl.rollout.sampler import AsyncSampler, MCPSampler
from agentrl.rollout.scoring import RecordScorer
from agentrl.rollout.stopping import SAMPLER, STOPPED, tell_sampling_stopped
from agentrl.rollout.tool_calls import ToolCaller
from agentrl.types import ServiceStatus, TaskClaim, TaskStatus, Worker

logger = logging.getLogger(__name__)

SHORTEST_POLL_S = 0.05  # bounded polling is what correctness rests on; a look costs about 3 ms of server time
LONGEST_POLL_S = 0.5
WANTING_COMMANDS = 3  # of a look that asks for engines, and for Tasks or the next epoch, too
CANCEL_GRACE_S = 10.0
GOODBYE_TIMEOUT_S = 5.0


async def run_sampler(
    config: RunConfig,
    *,
    store: Store,
    toolbox: Toolbox,
    client: GenerationClient,
    chat: ChatFormat,
    stop: asyncio.Event,
    sampler_class: type[AsyncSampler] = MCPSampler,
    scoring: RecordScorer | None = None,
    caller: ToolCaller | None = None,
) -> None:
    """`sample_run` without a browse agent. `caller` None: tools are called live, without prices."""
    parts = RunParts(
        config=config, store=store, toolbox=toolbox, client=client, chat=chat, sampler_class=sampler_class,
        scoring=scoring or RecordScorer(), caller=caller,
    )  # fmt: skip
    await sample_run(parts, stop=stop)


async def sample_run(parts: RunParts, *, stop: asyncio.Event) -> None:
    """Sample the training split until `stop` is set; then give unfinished Tasks back and return.

    Raises BudgetSpentError once no Record can go on.
    """
    await tell_sampling_stopped(parts.store, None)
    worker = SamplerWorker.build(
        parts.config, split="train", store=parts.store, toolbox=parts.toolbox, client=parts.client, chat=parts.chat,
        sampler_class=parts.sampler_class, scoring=parts.scoring, browser=parts.browser,
    )  # fmt: skip
    worker.call_tools_with(parts.caller)
    async with worker.upkeep():
        await worker.sample_until(stop)


@dataclass(slots=True, kw_only=True)
class SamplerWorker:
    """The state of one sampler process: its groups in flight."""

    config: RunConfig
    split: str
    store: Store
    runner: GroupRunner
    owner: str
    started_at: datetime
    epoch: int = 0
    groups: dict[str, tuple[TaskClaim, asyncio.Task[None]]] = field(default_factory=dict)
    heartbeat: asyncio.Task[None] | None = None
    refusal: BudgetSpentError | None = None  # no money for the next call of some Record: no further Task is claimed

    @classmethod
    def build(
        cls,
        config: RunConfig,
        *,
        split: str,
        store: Store,
        toolbox: Toolbox,
        client: GenerationClient,
        chat: ChatFormat,
        sampler_class: type[AsyncSampler],
        scoring: RecordScorer | None = None,
        browser: Browser | None = None,
    ) -> SamplerWorker:
        """Wire one worker for one split. `scoring` None: by rules alone."""
        agent = Agent(
            chat=chat,
            client=client,
            toolbox=toolbox,
            journal=store,
            commit_turn=store.commit_turn,
            rollout=config.rollout,
            inference=config.inference,
            reflection=config.reflection,
            tool_timeout_s=config.tools.tool_timeout_s,
            clock=_utc_now,
            scoring=scoring or RecordScorer(),
            browser=browser,
            seed=config.run.seed,
        )
        runner = GroupRunner(
            config=config,
            store=store,
            agent=agent,
            sampler_class=sampler_class,
            slots=asyncio.Semaphore(config.rollout.max_concurrent_samples_per_process),
            group_scores=(
                GroupScores.from_config(config, scoring=agent.scoring, store=store) if split == "train" else None
            ),
        )
        owner = f"{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:8]}"
        return cls(config=config, split=split, store=store, runner=runner, owner=owner, started_at=_utc_now())

    def call_tools_with(self, caller: ToolCaller | None) -> None:
        """How Records call tools from now on; None: live, without prices."""
        self.runner.agent = replace(self.runner.agent, caller=caller)

    @contextlib.asynccontextmanager
    async def upkeep(self) -> AsyncIterator[None]:
        """Heartbeats while the body runs; afterwards every unfinished Task is given back."""
        self.heartbeat = asyncio.create_task(self._heartbeat())
        try:
            yield
        finally:
            self.heartbeat.cancel()
            await asyncio.wait([self.heartbeat], timeout=CANCEL_GRACE_S)
            await self._cancel_groups()
            try:
                async with asyncio.timeout(GOODBYE_TIMEOUT_S):
                    await self._release_claims()
                    await self.store.put_worker(replace(self._describe(), num_running=0, phase=STOPPED))
            except (StoreError, TimeoutError) as error:
                logger.warning(
                    "claims not given back, their leases will run out: %s", str(error) or "no answer in time"
                )

    async def sample_until(self, stop: asyncio.Event) -> None:
        """Claim and run groups while there is capacity, enqueueing new epochs as the queue runs dry."""
        pace = Pace(shortest_s=SHORTEST_POLL_S, longest_s=LONGEST_POLL_S)
        while not stop.is_set():
            self.collect()
            self.check_refusal()
            counts = await self.look_over()
            num_pending = counts.get(TaskStatus.PENDING, 0)
            admitted = self._admitted(num_outstanding=outstanding(counts))
            wants_more = admitted > 0 and self.refusal is None and (num_pending > 0 or self._has_next_epoch)
            if wants_more and await self._start_more(admitted, num_pending=num_pending):
                pace.reset()
            await self._wait(stop, timeout_s=pace.pause(num_commands=WANTING_COMMANDS if wants_more else 1))

    async def drain(self) -> None:
        """Run the split's Tasks until none is pending or running (evaluation); no admission, no new epochs."""
        stop = asyncio.Event()
        pace = Pace(shortest_s=SHORTEST_POLL_S, longest_s=LONGEST_POLL_S)
        while True:
            self.collect()
            self.check_refusal()
            counts = await self.look_over()
            num_pending = counts.get(TaskStatus.PENDING, 0)
            if not self.groups and not num_pending and not counts.get(TaskStatus.RUNNING, 0):
                return
            if num_pending and self.refusal is None and await self.claim(self._free_groups()):
                pace.reset()
            await self._wait(stop, timeout_s=pace.pause())

    async def claim(self, limit: int) -> int:
        """Claim up to `limit` Tasks and start their groups."""
        if limit <= 0:
            return 0
        claims = await self.store.claim_tasks(
            split=self.split, owner=self.owner, lease_s=self.config.store.lease_s, limit=limit
        )
        for claim in claims:
            self.groups[claim.task.id] = (claim, asyncio.create_task(self.runner.run(claim), name=claim.task.id))
        return len(claims)

    def _free_groups(self) -> int:
        """Groups this process may start: always one if it is idle, however large the group."""
        rollout = self.config.rollout
        most = max(1, rollout.max_concurrent_samples_per_process // rollout.num_generations)
        return most + self.runner.put_down.num_waiting // rollout.num_generations - len(self.groups)

    async def look_over(self) -> Mapping[TaskStatus, int]:
        """Count the split's Tasks, after expired claims went back to the queue."""
        look = await self.store.look_over_tasks(split=self.split)
        if look.reaped:
            reaped = ", ".join(look.reaped[:5])
            logger.warning("returned %d expired claims to the queue: %s", len(look.reaped), reaped)
        return look.counts

    def _admitted(self, *, num_outstanding: int) -> int:
        """How many groups may be claimed now without any of them aging beyond max_staleness."""
        free = self._free_groups()
        if free <= 0:
            return 0
        algo = self.config.algo
        return groups_to_admit(
            num_outstanding=num_outstanding,
            num_free=free,
            tasks_per_step=algo.tasks_per_step,
            max_staleness=algo.max_staleness,
        )

    async def _start_more(self, limit: int, *, num_pending: int) -> bool:
        """Claim up to `limit` Tasks, or enqueue the next epoch if none is pending; whether anything came of it."""
        if not await can_be_served(self.store, max_staleness=self.config.algo.max_staleness):
            return False
        return await self.claim(limit) > 0 if num_pending else await self.refill()

    @property
    def _has_next_epoch(self) -> bool:
        limit = self.config.rollout.num_train_epochs
        return limit is None or self.epoch + 1 < limit

    async def refill(self) -> bool:
        """Enqueue the next epoch that is not there yet; whether anything was added."""
        while self._has_next_epoch:
            added = await self.store.enqueue_epoch(split=self.split, epoch=self.epoch + 1)
            if added is None:
                return False
            self.epoch += 1
            if added:
                logger.info("enqueued epoch %d: %d tasks", self.epoch, added)
                return True
        return False

    async def _wait(self, stop: asyncio.Event, *, timeout_s: float) -> None:
        """Until a group ends, `stop` is set or the time is over."""
        stopping = asyncio.create_task(stop.wait())
        try:
            running = [task for _, task in self.groups.values()]
            await asyncio.wait([stopping, *running], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()

    def collect(self) -> None:
        """Forget finished groups; an unexpected failure ends the process (others take its Tasks over)."""
        if self.heartbeat is not None and self.heartbeat.done():
            self.heartbeat.result()  # without heartbeats the claims would lapse: raise what ended it
        for task_id, (_, group) in list(self.groups.items()):
            if not group.done():
                continue
            error = None if group.cancelled() else group.exception()
            if isinstance(error, BudgetSpentError):  # it has given its claim back
                self.refusal, error = error, None
            if error is not None and not _is_lost_claim(error):
                raise error  # its claim is given back with the others
            del self.groups[task_id]
            if error is not None:
                logger.warning("lost the claim of %s: %s", task_id, error)

    def check_refusal(self) -> None:
        """Raise the refusal once nothing that was paid for is under way any more."""
        if self.refusal is not None and not self.groups:
            raise self.refusal

    async def _heartbeat(self) -> None:
        while True:
            claims = [claim for claim, _ in self.groups.values()]
            for task_id in await self.store.renew_claims(claims, lease_s=self.config.store.lease_s) if claims else []:
                if task_id in self.groups:
                    self.groups[task_id][1].cancel()
            await self.store.put_worker(self._describe())
            await asyncio.sleep(self.config.store.heartbeat_s)

    def _describe(self) -> Worker:
        return Worker(
            id=self.owner,
            kind=SAMPLER if self.split == "train" else "evaluator",
            host=socket.gethostname(),
            pid=os.getpid(),
            num_running=self.runner.num_in_flight,
            phase=self._phase,
            started_at=self.started_at,
        )

    @property
    def _phase(self) -> str:
        if self.groups:
            return "sampling"
        return "waiting" if self.refusal is None else STOPPED

    async def say_stopped(self) -> None:
        """Show the others that a refused worker without groups claims nothing more."""
        await self.store.put_worker(self._describe())

    async def give_back(self) -> None:
        """Stop what runs and return it to the queue; whoever claims it next continues from the last turn."""
        await self._cancel_groups()
        await self._release_claims()

    async def _cancel_groups(self) -> None:
        for _, group in self.groups.values():
            group.cancel()
        if self.groups:
            await asyncio.wait([group for _, group in self.groups.values()], timeout=CANCEL_GRACE_S)

    async def _release_claims(self) -> None:
        """Release the claims of cancelled groups, so that others need not wait for the leases."""
        for claim, group in self.groups.values():
            if group.done() and (group.cancelled() or group.exception() is not None):
                await self.store.release_claim(claim)
        self.groups.clear()


async def count_outstanding(store: TaskStore, *, split: str) -> int:
    """Groups that are running, settled or in training: work the trainer has not finished with."""
    return outstanding(await store.count_tasks(split=split))


def outstanding(counts: Mapping[TaskStatus, int]) -> int:
    """The same from counts that are there already."""
    return counts.get(TaskStatus.RUNNING, 0) + counts.get(TaskStatus.SETTLED, 0)


async def can_be_served(store: FleetStore, *, max_staleness: int) -> bool:
    """Whether some service is up, with weights so fresh that their tokens may still be trained.

    Without one, claiming would only turn Tasks into typed failures.
    """
    latest = await store.latest_policy() if max_staleness == 0 else None
    oldest = 0 if latest is None else latest.version
    services = await store.list_services()
    return any(s.status is ServiceStatus.UP and s.policy_version >= oldest for s in services)


def _is_lost_claim(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(_is_lost_claim(inner) for inner in error.exceptions)
    return isinstance(error, StaleClaimError)


def _utc_now() -> datetime:
    return datetime.now(UTC)
