"""The stability watch, on rank 0: remembers the ledger's numbers, raises alarms, names Records (algo/watch.py)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from agentrl.algo.watch import BASE_STEPS, HISTORY_STEPS, AlarmName, StepNumbers, Suspicion, look
from agentrl.train.feed import StoreFeed
from agentrl.train.row_stats import RowStats
from agentrl.types import Alarm, StepStatus, TrainStep

log = logging.getLogger(__name__)

MAX_SUBJECTS = 8

BLAME: Mapping[AlarmName, Callable[[RowStats], float]] = {
    AlarmName.ENTROPY_COLLAPSE: lambda row: -row.entropy_sum / row.num_tokens,
    AlarmName.GRADIENT_SPIKE: lambda row: row.loss_share,
    AlarmName.MISMATCH_DRIFT: lambda row: row.mismatch_sum / row.num_tokens,
    AlarmName.LIKELIHOOD_COLLAPSE: lambda row: -row.positive_logprob_sum / max(row.num_positive, 1),
    AlarmName.LENGTH_REWARD: lambda row: row.num_tokens,
}
"""How much a row looks like a cause. A zero signal has no rows: the groups without one are named instead."""


class StabilityWatch:
    """What happened so far, for `algo.watch.look`. Reads the past from the ledger, so a resume sees the same."""

    def __init__(self, feed: StoreFeed, *, first_step: int) -> None:
        past = {*range(1, min(first_step, BASE_STEPS + 1)), *range(max(1, first_step - HISTORY_STEPS), first_step)}
        entries = [_entry(feed, number) for number in sorted(past)]
        self._history: list[StepNumbers] = []
        self._raised: dict[str, int] = {}
        for entry in entries:
            if entry is not None and entry.status is StepStatus.COMMITTED:
                self.remember(entry, metrics=entry.metrics)

    def alarms(self, entry: TrainStep, *, metrics: Mapping[str, float], rows: Sequence[RowStats]) -> tuple[Alarm, ...]:
        """The alarms of a step just made, with the Records (or Tasks) that look like their cause, worst first."""
        suspicions = look([*self._history, StepNumbers(step=entry.step, metrics=metrics)], raised=self._raised)
        alarms = tuple(_alarm(suspicion, entry=entry, rows=rows) for suspicion in suspicions)
        for alarm in alarms:
            log.warning("step %d: alarm %s: %s; %s", entry.step, alarm.name, alarm.message, ", ".join(alarm.subjects))
        self.remember(replace(entry, alarms=alarms), metrics=metrics)
        return alarms

    def remember(self, entry: TrainStep, *, metrics: Mapping[str, float]) -> None:
        """A step and its alarms, without looking at it: one of the past, or one that a kill left without its commit."""
        self._history.append(StepNumbers(step=entry.step, metrics=dict(metrics)))
        self._history = [n for n in self._history if n.step <= BASE_STEPS or n.step > entry.step - HISTORY_STEPS]
        self._raised.update((alarm.name, entry.step) for alarm in entry.alarms)


def _entry(feed: StoreFeed, step: int) -> TrainStep | None:
    return feed.call(lambda store: store.get_step(step))


def _alarm(suspicion: Suspicion, *, entry: TrainStep, rows: Sequence[RowStats]) -> Alarm:
    if suspicion.name is AlarmName.ZERO_SIGNAL:
        subjects = sorted(entry.dropped)
    else:
        blame = BLAME[suspicion.name]
        suspects = [row for row in rows if row.num_positive or suspicion.name is not AlarmName.LIKELIHOOD_COLLAPSE]
        subjects = list(dict.fromkeys(row.record_id for row in sorted(suspects, key=blame, reverse=True)))
    return Alarm(
        name=suspicion.name.value,
        message=suspicion.message,
        steps=suspicion.steps,
        subjects=tuple(subjects[:MAX_SUBJECTS]),
    )
