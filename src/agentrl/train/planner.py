"""Decides, on rank 0 and by id alone, what each optimizer step trains.

    plan in the ledger?  -- yes: replay it exactly (a resume) ------------------------------+
         | no                                                                               |
    sampling on:  oldest `tasks_per_step` settled groups (reuse.py); a group with a token   +-> store.plan_step
                  older than `max_staleness` is dropped as "stale", one that a quarantined  |   (first plan wins)
                  engine sampled for as "quarantined_engine", one that was settled with     |
                  other scores as "score_version"; groups dropped at settlement are         |
                  consumed without being trained; a batch without signal does not step      |
    sampling off: the next `sft_batch_size` rows of the epoch's shuffled order -------------+

The plan is in the ledger before anything is trained, and carries the group metrics: a replay needs the rows only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial

import numpy as np

from agentrl.algo.layouts import DEFAULT_RULE, LayoutRule
from agentrl.algo.row_faults import row_faults
from agentrl.algo.score_versions import OTHER_VERSION, other_versions, versions_of
from agentrl.algo.suspects import QUARANTINED_ENGINE, spoiled_by
from agentrl.algo.trie import summarise_groups
from agentrl.config.sections import RunConfig
from agentrl.errors import BudgetSpentError, ConfigError, UnavailableError
from agentrl.pacing import Pace
from agentrl.train.feed import StoreFeed
from agentrl.train.group_metrics import group_metrics
from agentrl.train.metrics import Report
from agentrl.train.passes import Passes, forward_passes
from agentrl.train.reuse import RETIRED, Reuse, is_stale
from agentrl.train.row_check import first_faults, refuse
from agentrl.types import GroupOutcome, SequenceSummary, SettledGroup, StepStatus, TaskStatus, TrainStep

log = logging.getLogger(__name__)

TRAIN_SPLIT = "train"
STALE = "stale"
# Dropping one of these must not prolong the wait for data.
NO_DATA = frozenset({STALE, RETIRED, QUARANTINED_ENGINE, OTHER_VERSION})
SIGNAL_PATIENCE = 10  # full batches without signal may prolong the wait to so many times data_timeout_s
_COMMANDS_OF_A_LOOK = 2  # settled groups, and whether sampling was stopped
SHORTEST_POLL_S = 0.02
LONGEST_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What one optimizer step does, the same on every rank."""

    entry: TrainStep  # as it is in the ledger
    sequences: tuple[SequenceSummary, ...]  # in the order of entry.sequence_ids
    passes: Passes


Groups = list[tuple[SequenceSummary, ...]]
"""The rows of a step, those of one Task together and in the order in which they were settled."""


class StepPlanner:
    """Plans steps for all ranks. Lives on rank 0; the loop broadcasts what it returns."""

    def __init__(
        self,
        feed: StoreFeed,
        *,
        config: RunConfig,
        num_ranks: int,
        report: Report,
        rule: LayoutRule = DEFAULT_RULE,
        sleep: Callable[[float], None] = time.sleep,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`check` is called while it waits for groups; what it raises ends the wait."""
        self._feed = feed
        self._config = config
        self._num_ranks = num_ranks
        self._report = report
        self._rule = rule
        self._sleep = sleep
        self._check = check
        self._row_ids: list[str] | None = None  # of the training split, sorted; supervised training only
        self._dropped_since_plan: dict[str, int] = {}
        self._checked_at: datetime | None = None  # server time of the last look at the quarantines

    def plan(self, step: int) -> StepPlan:
        """The plan of a step: the ledger's if there is one, else a new one, written before it is returned.

        Raises UnavailableError if not enough groups settle within `data_timeout_s`, BudgetSpentError if no more will,
        ConfigError if there are no rows.
        """
        proposal, groups = self._proposal(step)
        entry = self._feed.call(lambda store: store.plan_step(proposal))
        if _row_ids(groups) != entry.sequence_ids:
            rows = self._feed.load(entry.sequence_ids)
            refuse(first_faults(rows, find=partial(row_faults, is_supervised=is_supervised(self._config))))
            groups = summarise_groups(rows)
        max_tokens = self._config.train.max_tokens
        passes = forward_passes(groups, num_ranks=self._num_ranks, max_tokens=max_tokens, rule=self._rule)
        if is_supervised(self._config) and step < self._config.train.max_steps:
            self._feed.prefetch(self._supervised_ids(step + 1))
        return StepPlan(entry=entry, sequences=_in_order(groups, entry.sequence_ids), passes=passes)

    def _proposal(self, step: int) -> tuple[TrainStep, Groups]:
        """The ledger's plan or a new one, and its rows by group as far as they are known without loading them."""
        known = self._entry(step)
        if known is not None:
            return known, []
        if is_supervised(self._config):
            return _planned(step, sequence_ids=self._supervised_ids(step)), []
        reuse = self._reuse(step)
        settled = self._wait_for_groups(step, reuse=reuse)
        groups = [group.sequences for group in settled if _trains(group)]
        metrics = group_metrics(settled)
        if self._config.algo.max_trained_count > 1:
            metrics["num_retrained"] = float(reuse.num_retrained(settled))
        metrics.update((f"num_dropped_{reason}", float(count)) for reason, count in self._dropped_since_plan.items())
        self._dropped_since_plan.clear()
        proposal = _planned(
            step,
            sequence_ids=_row_ids(groups),
            task_ids=[group.settlement.task_id for group in settled],
            dropped=_drop_reasons(settled),
            retained=reuse.retained(settled),
            score_versions=versions_of(settled),
            metrics=metrics,
            planned_at=self._checked_at,
        )
        return proposal, groups

    def _reuse(self, step: int) -> Reuse:
        """The rule for a step, with the part of the ledger it looks at; nothing is read where groups train once."""
        algo = self._config.algo
        earlier = range(max(1, step - algo.max_staleness), step) if algo.max_trained_count > 1 else ()
        entries = [self._entry(number) for number in earlier]
        return Reuse(
            step=step,
            max_trained_count=algo.max_trained_count,
            retrained_interval=algo.retrained_interval,
            max_staleness=algo.max_staleness,
            history=[entry for entry in entries if entry is not None],
        )

    def _entry(self, step: int) -> TrainStep | None:
        return self._feed.call(lambda store: store.get_step(step))

    def _wait_for_groups(self, step: int, *, reuse: Reuse) -> list[SettledGroup]:
        wanted = self._config.algo.tasks_per_step
        limit = wanted * (1 + len(reuse.history))  # each earlier step may have left a batch that is not due yet
        pace = Pace(shortest_s=SHORTEST_POLL_S, longest_s=LONGEST_POLL_S)
        num_seen = 0
        timeout_s = self._config.train.data_timeout_s
        deadline = time.monotonic() + timeout_s
        last_deadline = deadline + (SIGNAL_PATIENCE - 1) * timeout_s
        over: str | None = None
        while True:
            asked_at = time.monotonic()
            settled = self._feed.call(lambda store: store.settled_groups(split=TRAIN_SPLIT, limit=limit))
            away_s = time.monotonic() - asked_at  # while the database is away, nobody can settle a group either
            deadline, last_deadline = deadline + away_s, last_deadline + away_s
            groups = reuse.usable(settled)[:wanted]
            unusable = self._unusable(settled, groups, reuse=reuse)
            if not unusable and len(groups) >= wanted:
                unusable = self._spoiled(groups)
                if not unusable:
                    self._retire(settled, groups, reuse=reuse)
                    return groups
            if unusable:
                self._drop(unusable, step=step)
            if unusable and not NO_DATA.intersection(unusable.values()):  # fresh groups, only without signal
                deadline = min(time.monotonic() + timeout_s, last_deadline)
            if not unusable and over is not None:
                raise BudgetSpentError(self._nothing_comes(step, num_groups=len(groups), reason=over))
            over = self._sampling_is_over()
            if not unusable and over is not None:
                continue  # what settled just before counts
            if time.monotonic() > deadline:
                raise UnavailableError(self._nothing_came(step, num_groups=0 if unusable else len(groups)))
            if unusable:
                continue
            self._report("wait", step)
            self._check()
            if len(settled) != num_seen:
                num_seen = len(settled)
                pace.reset()
            self._sleep(pace.pause(num_commands=_COMMANDS_OF_A_LOOK))

    def _sampling_is_over(self) -> str | None:
        """Why no further group will settle, once sampling was stopped and none is running."""
        reason = self._feed.call(lambda store: store.sampling_stop())
        if reason is None:
            return None
        counts = self._feed.call(lambda store: store.count_tasks(split=TRAIN_SPLIT))
        return None if counts.get(TaskStatus.RUNNING, 0) else reason

    def _nothing_comes(self, step: int, *, num_groups: int, reason: str) -> str:
        return (
            f"step {step}: sampling was stopped: {reason}; {num_groups} of tasks_per_step = "
            f"{self._config.algo.tasks_per_step} groups are settled and no more will be. Raise the budget "
            "(--budget_usd of the sampler, agentrl fleet set) and start the trainer again, or use the run as it is"
        )

    def _unusable(
        self, settled: Sequence[SettledGroup], groups: Sequence[SettledGroup], *, reuse: Reuse
    ) -> dict[str, str]:
        """Groups to drop without a step: the stale ones, or all of a full batch that has nothing to train."""
        stale = {
            group.settlement.task_id: STALE
            for group in settled
            if is_stale(group, policy_version=reuse.step - 1, max_staleness=reuse.max_staleness)
        }
        stale |= dict.fromkeys(reuse.retired(settled, step=reuse.step), RETIRED)
        stale |= other_versions(settled, wanted=self._config.algo.score_version)
        if stale or len(groups) < self._config.algo.tasks_per_step:
            return stale
        if not any(row.num_trained_tokens for group in groups if _trains(group) for row in group.sequences):
            return _drop_reasons(groups, otherwise="no_trained_tokens")
        if self._config.algo.is_whitened_per_step and not _has_spread(groups):
            return _drop_reasons(groups, otherwise="no_spread")
        return {}

    def _spoiled(self, groups: Sequence[SettledGroup]) -> dict[str, str]:
        """Groups with tokens of a quarantined engine: their baselines are spoiled, so none of their rows is trained.

        The time is asked before the quarantines, and becomes the plan's: whatever was raised
        earlier, by more than the error of the clock, was seen.
        """
        self._checked_at = self._feed.call(lambda store: store.server_time())
        quarantines = self._feed.call(lambda store: store.list_engine_quarantines())
        return {
            group.settlement.task_id: QUARANTINED_ENGINE
            for group in groups
            if spoiled_by(group.settlement.engines, quarantines) is not None
        }

    def _retire(self, settled: Sequence[SettledGroup], taken: Sequence[SettledGroup], *, reuse: Reuse) -> None:
        """Consume the trained groups that are not taken and too old for the next step: samplers get their places."""
        taken_ids = {group.settlement.task_id for group in taken}
        retired = [task_id for task_id in reuse.retired(settled, step=reuse.step + 1) if task_id not in taken_ids]
        if retired:
            self._drop(dict.fromkeys(retired, RETIRED), step=reuse.step)

    def _drop(self, drops: Mapping[str, str], *, step: int) -> None:
        self._feed.call(lambda store: store.drop_groups(drops))
        for reason in drops.values():
            self._dropped_since_plan[reason] = self._dropped_since_plan.get(reason, 0) + 1
        log.info("step %d: dropped %d groups without a step: %s", step, len(drops), sorted(set(drops.values())))

    def _nothing_came(self, step: int, *, num_groups: int) -> str:
        counts = self._feed.call(lambda store: store.count_tasks(split=TRAIN_SPLIT))
        statuses = ", ".join(f"{count} {status.value}" for status, count in counts.items())
        dropped = ", ".join(f"{count} {reason}" for reason, count in self._dropped_since_plan.items())
        return (
            f"step {step}: {num_groups} of tasks_per_step = {self._config.algo.tasks_per_step} groups settled within "
            f"data_timeout_s = {self._config.train.data_timeout_s:g}; tasks: {statuses or 'none'}; "
            f"dropped meanwhile: {dropped or 'none'}. "
            "Are samplers running, do engines serve fresh weights (agentrl status), and are there tasks left?"
        )

    def _supervised_ids(self, step: int) -> list[str]:
        if self._row_ids is None:
            self._row_ids = self._feed.call(lambda store: store.list_sequences(split=TRAIN_SPLIT))
        if not self._row_ids:
            raise ConfigError('no rows of split "train" in the database: load supervised rows before training on them')
        return supervised_batch(
            self._row_ids, step=step, batch_size=self._config.train.sft_batch_size, seed=self._config.run.seed
        )


def is_supervised(config: RunConfig) -> bool:
    """Whether steps train on rows that are there, instead of on groups that samplers settle."""
    return not config.rollout.enable_sampling or config.loss.loss == "CROSS_ENTROPY"


def supervised_batch(row_ids: Sequence[str], *, step: int, batch_size: int, seed: int) -> list[str]:
    """Rows of one step, a pure function of its arguments. Steps count from 1.

    Each epoch is a new order; a batch never spans epochs, so no step sees a row twice and an epoch's last batch may
    be smaller.
    """
    steps_per_epoch = -(-len(row_ids) // batch_size)
    epoch, batch = divmod(step - 1, steps_per_epoch)
    order = np.random.default_rng((seed, epoch)).permutation(len(row_ids))
    return [row_ids[index] for index in order[batch * batch_size : (batch + 1) * batch_size]]


def _trains(group: SettledGroup) -> bool:
    return group.settlement.outcome is GroupOutcome.TRAINABLE


def _has_spread(groups: Sequence[SettledGroup]) -> bool:
    """Whether the mean returns of the step's Records differ: if not, whitening leaves nothing to train on."""
    returns = {value for group in groups if _trains(group) for value in group.settlement.advantages.values()}
    return len(returns) > 1


def _row_ids(groups: Groups) -> tuple[str, ...]:
    return tuple(row.id for group in groups for row in group)


def _in_order(groups: Groups, row_ids: Sequence[str]) -> tuple[SequenceSummary, ...]:
    summaries = {row.id: row for group in groups for row in group}
    return tuple(summaries[row_id] for row_id in row_ids)


def _drop_reasons(groups: Sequence[SettledGroup], *, otherwise: str | None = None) -> dict[str, str]:
    reasons = {}
    for group in groups:
        reason = otherwise if _trains(group) else group.settlement.drop_reason or "dropped"
        if reason is not None:
            reasons[group.settlement.task_id] = reason
    return reasons


def _planned(
    step: int,
    *,
    sequence_ids: Sequence[str],
    task_ids: Sequence[str] = (),
    dropped: Mapping[str, str] | None = None,
    retained: Sequence[str] = (),
    score_versions: Mapping[str, str] | None = None,
    metrics: Mapping[str, float] | None = None,
    planned_at: datetime | None = None,
) -> TrainStep:
    return TrainStep(
        step=step,
        status=StepStatus.PLANNED,
        policy_version=step - 1,
        task_ids=tuple(task_ids),
        sequence_ids=tuple(sequence_ids),
        dropped=dict(dropped or {}),
        retained=tuple(retained),
        score_versions=dict(score_versions or {}),
        metrics=dict(metrics or {}),
        planned_at=planned_at,
    )
