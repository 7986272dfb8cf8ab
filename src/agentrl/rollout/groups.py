"""One claimed Task: its group of Records, sampled concurrently and settled once.

    claim ─► open Records ─► resume, restart or start each ─► finish each ─► settle (advantages, training rows)
                                    ▲                              │ failed by infrastructure, with
                                    │                              │ resample_error_records and attempts left;
                                    └──────── next attempt ◄───────┘ or sampled by a quarantined engine

The claim's lease is renewed by the worker. Losing it cancels the group; whatever was committed stays, and the next
owner continues from there, where the tools used so far allow it (recovery.py). Settling is idempotent, so dying just
before or after it loses nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from agentrl.algo.settle import settle_group
from agentrl.algo.suspects import QUARANTINED_ENGINE, engines_of, spoiled_by
from agentrl.config import RunConfig
from agentrl.errors import BudgetSpentError
from agentrl.protocols import TaskStore
from agentrl.rollout.agent import Agent
from agentrl.rollout.custom import sampler_for
from agentrl.rollout.group_scores import GroupScores
from agentrl.rollout.partial import LegLimits, PutDown, newest_version
from agentrl.rollout.patience import Patience
from agentrl.rollout.recovery import unresumable_tools
from agentrl.rollout.sampler import AsyncSampler
from agentrl.types import Record, RecordStatus, StopReason, TaskClaim, Turn

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """What one stretch of sampling left: the final header and its turns, or a running one."""

    record: Record
    turns: tuple[Turn, ...]
    unjudged: Record | None  # the running header, where the final one says only that its judge was away


@dataclass(slots=True, kw_only=True)
class GroupRunner:
    """Runs claimed groups for one process. `slots` bounds the Records in flight over all groups."""

    config: RunConfig
    store: TaskStore
    agent: Agent
    sampler_class: type[AsyncSampler]
    slots: asyncio.Semaphore
    group_scores: GroupScores | None = None  # None: groups are settled with the Records' own scores
    num_in_flight: int = 0  # Records being sampled now
    put_down: PutDown = field(init=False)  # Records that wait for the next policy version

    def __post_init__(self) -> None:
        """Nothing waits yet."""
        self.put_down = PutDown(latest_policy=self.store.latest_policy)

    async def run(self, claim: TaskClaim) -> None:
        """Bring a claimed group to its settlement.

        Raises StaleClaimError if the claim is lost on the way, BudgetSpentError if a Record's next call cannot be paid:
        the others go on as far as they can, then the claim is given back, and whoever takes it continues all of them.
        """
        records = await self.store.open_records(claim)
        if claim.fence > self.config.rollout.max_task_attempts:
            finished = [await self._give_up(claim, record) for record in records]
        else:
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(self._run_or_put_down(claim, record)) for record in records]
            outcomes = [task.result() for task in running]
            refusals = [outcome for outcome in outcomes if isinstance(outcome, BudgetSpentError)]
            if refusals:
                await self.store.release_claim(claim)
                raise refusals[0]
            finished = [outcome for outcome in outcomes if not isinstance(outcome, BudgetSpentError)]
        await self._settle(claim, finished)

    async def _settle(self, claim: TaskClaim, finished: Sequence[tuple[Record, tuple[Turn, ...]]]) -> None:
        settlement, sequences = settle_group(
            claim.task,
            await self._scored(claim, finished),
            {record.id: turns for record, turns in finished},
            algo=self.config.algo,
            min_turns=self.config.rollout.min_turns,
            score_version=None if self.group_scores is None else self.group_scores.version,
        )
        await self.store.settle_task(claim, settlement, sequences)
        logger.info(
            "settled %s: %s%s, rewards %s",
            claim.task.id,
            settlement.outcome.value,
            f" ({settlement.drop_reason})" if settlement.drop_reason else "",
            [round(reward, 3) for reward in settlement.rewards.values()],
        )

    async def _scored(self, claim: TaskClaim, finished: Sequence[tuple[Record, tuple[Turn, ...]]]) -> list[Record]:
        """The Records with the scores the group is settled with. Without money for them the claim is given back."""
        if self.group_scores is None:
            return [record for record, _ in finished]
        try:
            return await self.group_scores.of_group(claim.task, finished, tools=self.agent.toolbox.list_tools())
        except BudgetSpentError:
            await self.store.release_claim(claim)
            raise

    async def _run_or_put_down(
        self, claim: TaskClaim, record: Record
    ) -> tuple[Record, tuple[Turn, ...]] | BudgetSpentError:
        """The finished Record, or why it stays as it is: running, with the turns it has committed."""
        try:
            return await self._run_record(claim, record)
        except BudgetSpentError as refusal:
            logger.warning("%s is put down with its committed turns: %s", record.id, refusal)
            return refusal

    async def _run_record(self, claim: TaskClaim, record: Record) -> tuple[Record, tuple[Turn, ...]]:
        """The Record's last attempt. A takeover continues where the last owner stopped, between attempts too."""
        while True:
            final, turns = await self._run_attempt(claim, record)
            if not self._is_sampled_again(final):
                return final, turns
            logger.warning("%s: attempt %d failed: %s", final.id, final.attempt, final.error or final.stop_reason)
            record = await self.store.reopen_record(final)

    def _is_sampled_again(self, record: Record) -> bool:
        rollout = self.config.rollout
        if record.stop_reason is StopReason.JUDGE_ERROR:  # sampled well: it is judged again, see `agentrl rescore`
            return False
        is_quarantined = (record.error or "").startswith(QUARANTINED_ENGINE)
        is_wanted = rollout.resample_error_records or is_quarantined
        return record.status is RecordStatus.FAILED and is_wanted and record.attempt < rollout.max_record_attempts

    async def _run_attempt(self, claim: TaskClaim, record: Record) -> tuple[Record, tuple[Turn, ...]]:
        committed = await self.store.load_turns(record) if record.turn_ids else []
        if record.is_final:
            return record, tuple(committed)
        lost = unresumable_tools(committed, toolbox=self.agent.toolbox)
        if lost:
            record, committed = await self._restart(record, lost=lost), []
        leg = await self._run_leg(claim, record, committed)
        patience = Patience(limit_s=self.config.rollout.judge_patience_s)
        while await self._goes_on(leg, patience=patience):
            leg = await self._run_leg(claim, leg.unjudged or leg.record, leg.turns)
        final = await self._without_quarantined(leg.record, leg.turns)
        await self.store.finish_record(final)
        return final, leg.turns

    async def _goes_on(self, leg: Leg, *, patience: Patience) -> bool:
        """Whether another leg follows; first waits for what it needs, the next policy version or a judge."""
        if leg.record.status is RecordStatus.RUNNING:
            await self.put_down.wait(
                version=newest_version(leg.turns),
                max_wait_s=self.config.rollout.record_timeout_s,
                is_idle=lambda: self.num_in_flight == 0,
            )
            return True
        if leg.unjudged is None:
            return False
        logger.warning("%s waits for its judge: %s", leg.record.id, leg.record.error)
        return await patience.wait()

    async def _run_leg(self, claim: TaskClaim, record: Record, committed: Sequence[Turn]) -> Leg:
        """Sample a Record from its committed turns until it stops or is put down; without a judge, score it again."""
        is_trained = claim.task.split == "train"
        leg_limits = LegLimits.from_config(self.config.rollout, max_staleness=self.config.algo.max_staleness)
        agent = replace(self.agent, leg_limits=leg_limits if is_trained else None)
        async with self.slots:
            sampler_class = sampler_for(self.sampler_class, committed=committed)
            sampler = sampler_class(claim.task, record=record, committed=committed, agent=agent)
            self.num_in_flight += 1
            try:
                final, turns = await sampler.sample()
            finally:
                self.num_in_flight -= 1
        return Leg(record=final, turns=turns, unjudged=sampler.unjudged)

    async def _without_quarantined(self, record: Record, turns: tuple[Turn, ...]) -> Record:
        """The Record, or a failure in its place if a quarantined engine sampled any of its turns."""
        quarantine = spoiled_by(engines_of(turns), await self.store.list_engine_quarantines())
        if quarantine is None or record.status is not RecordStatus.FINISHED:
            return record
        error = f"{QUARANTINED_ENGINE}: {quarantine.service_id} answered its canaries wrongly"
        return replace(
            record, status=RecordStatus.FAILED, stop_reason=StopReason.ENGINE_ERROR, error=error,
            answer=None, score=None, scorer=None, turn_scores=(), episodes=(),
        )  # fmt: skip

    async def _restart(self, record: Record, *, lost: Sequence[str]) -> Record:
        """The next attempt of a Record that was taken over and cannot be continued here."""
        reason = (
            f"taken over at fence {record.fence} after using {', '.join(lost)}, which cannot be continued elsewhere"
        )
        logger.warning("%s: attempt %d restarts: %s", record.id, record.attempt, reason)
        return await self.store.restart_record(record, reason=reason)

    async def _give_up(self, claim: TaskClaim, record: Record) -> tuple[Record, tuple[Turn, ...]]:
        """Close a Record of a Task that was claimed too often: whoever works on it dies."""
        if record.is_final:
            return record, tuple(await self.store.load_turns(record))
        error = f"claimed {claim.fence} times, max_task_attempts = {self.config.rollout.max_task_attempts}"
        final = replace(record, status=RecordStatus.FAILED, stop_reason=StopReason.ABORTED, error=error)
        await self.store.finish_record(final)
        return final, ()
