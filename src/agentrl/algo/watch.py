"""Stability watch: looks at the numbers of the last steps and says what is going wrong, by name. Pure; no torch.

    alarm                  raised when (w = mean of the last 5 steps; base = median of the first 10)
    entropy_collapse       entropy: w < 2 % of base: the policy repeats itself and explores no more
    gradient_spike         grad_norm is 8 robust standard deviations, and 4 times, above the 20 steps before
    mismatch_drift         mismatch: w > 10 x base, and above 0.01: trainer and engine disagree ever more
    likelihood_collapse    positive_logprob_mean: w is 0.5 below its best w so far, in 5 steps one after the other:
                           what is rewarded becomes less likely (lazy likelihood displacement)
    zero_signal            fewer than 5 % of the groups had a signal, 5 steps in a row
    length_reward          correlation of length and reward in a group: w beyond +-0.75 while lengths are 2 x base:
                           reward is earned by length (+), or answers are cut off as they grow (-)

A number that is not in the metrics, because the step could not measure it, is not looked at. An alarm that was raised
is not raised again for 10 steps. Everything follows from the ledger, so a resumed run raises the same alarms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, median
from typing import Any

WINDOW_STEPS = 5
BASE_STEPS = 10
SPIKE_HISTORY_STEPS = 20
SPIKE_HISTORY_AT_LEAST = 8
QUIET_STEPS = 10
HISTORY_STEPS = BASE_STEPS + WINDOW_STEPS + SPIKE_HISTORY_STEPS

ENTROPY_SHARE = 0.02
SPIKE_DEVIATIONS = 8.0
SPIKE_FACTOR = 4.0
SPIKE_SPREAD_AT_LEAST = 0.1  # of the log: a run of nearly equal norms is no reason to call 5 % more a spike
MISMATCH_FACTOR = 10.0
MISMATCH_AT_LEAST = 0.01
LIKELIHOOD_FALL = 0.5
SIGNAL_SHARE = 0.05
LENGTH_CORRELATION = 0.75
LENGTH_GROWTH = 2.0
SILENT_REASONS = ("zero_advantage", "minimal_advantage", "non_positive_advantage", "no_spread")
MAD_TO_DEVIATION = 1.4826  # of a normal distribution


class AlarmName(StrEnum):
    """What can go wrong. Closed."""

    ENTROPY_COLLAPSE = "entropy_collapse"
    GRADIENT_SPIKE = "gradient_spike"
    MISMATCH_DRIFT = "mismatch_drift"
    LIKELIHOOD_COLLAPSE = "likelihood_collapse"
    ZERO_SIGNAL = "zero_signal"
    LENGTH_REWARD = "length_reward"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNumbers:
    """The metrics of one step."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicion:
    """An alarm before its Records are looked up."""

    name: AlarmName
    message: str
    steps: tuple[int, ...]


Series = Sequence[tuple[int, float]]
"""(step, number) of the steps that have the number, in order."""


def look(history: Sequence[StepNumbers], *, raised: Mapping[str, int]) -> list[Suspicion]:
    """The alarms of the newest step of `history`, which is in order of steps.

    `raised` has the step at which each alarm was last raised. What is needed of the past: the first BASE_STEPS steps of
    the run and the newest HISTORY_STEPS.
    """
    found = [suspicion for detector in DETECTORS for suspicion in detector(history)]
    newest = history[-1].step if history else 0
    return [suspicion for suspicion in found if newest - raised.get(suspicion.name.value, -QUIET_STEPS) >= QUIET_STEPS]


def entropy_collapse(history: Sequence[StepNumbers]) -> Iterator[Suspicion]:
    """The policy's distributions have next to no entropy left, compared with the start of the run."""
    base, window = _base_and_window(history, "entropy")
    if base and base > 0 and _mean(window) < ENTROPY_SHARE * base:
        message = f"entropy {_mean(window):.3g} over {_span(window)}, {base:.3g} at the start"
        yield Suspicion(name=AlarmName.ENTROPY_COLLAPSE, message=message, steps=_steps(window))


def gradient_spike(history: Sequence[StepNumbers]) -> Iterator[Suspicion]:
    """One step's gradient norm is far outside those of the steps before, on the scale of logarithms."""
    series = [(step, math.log(norm)) for step, norm in _series(history, "grad_norm") if norm > 0]
    before, newest = series[-SPIKE_HISTORY_STEPS - 1 : -1], series[-1:]
    if len(before) < SPIKE_HISTORY_AT_LEAST or not _is_newest(newest, history):
        return
    centre = median(value for _, value in before)
    spread = MAD_TO_DEVIATION * median(abs(value - centre) for _, value in before)
    above = newest[0][1] - centre
    deviations = above / max(spread, SPIKE_SPREAD_AT_LEAST)
    if deviations > SPIKE_DEVIATIONS and above > math.log(SPIKE_FACTOR):
        message = f"gradient norm {math.exp(newest[0][1]):.3g}, {math.exp(centre):.3g} in the steps before"
        yield Suspicion(name=AlarmName.GRADIENT_SPIKE, message=message, steps=_steps(newest))


def mismatch_drift(history: Sequence[StepNumbers]) -> Iterator[Suspicion]:
    """Trainer and engine disagree on log-probs at equal weights, and did not at the start."""
    base, window = _base_and_window(history, "mismatch")
    if base is not None and _mean(window) > max(MISMATCH_FACTOR * base, MISMATCH_AT_LEAST):
        message = f"mismatch {_mean(window):.3g} over {_span(window)}, {base:.3g} at the start"
        yield Suspicion(name=AlarmName.MISMATCH_DRIFT, message=message, steps=_steps(window))


def likelihood_collapse(history: Sequence[StepNumbers]) -> Iterator[Suspicion]:
    """Tokens with a positive advantage lose log-prob over many steps although they are trained up."""
    series = _series(history, "positive_logprob_mean")
    ends = range(WINDOW_STEPS, len(series) + 1)
    means = [_mean(series[end - WINDOW_STEPS : end]) for end in ends]
    if len(means) <= WINDOW_STEPS or not _is_newest(series[-1:], history):
        return
    best = max(means[:-WINDOW_STEPS])
    if all(mean < best - LIKELIHOOD_FALL for mean in means[-WINDOW_STEPS:]):
        window = series[-WINDOW_STEPS:]
        message = f"mean log-prob of rewarded tokens {means[-1]:.3g} over {_span(window)}, {best:.3g} at its best"
        yield Suspicion(name=AlarmName.LIKELIHOOD_COLLAPSE, message=message, steps=_steps(window))


def zero_signal(history: Sequence[StepNumbers]) -> Iterator[Suspicion]:
    """Hardly any group has a spread of rewards: the tasks are too easy, too hard, or the scorer is broken."""
    window = [(numbers.step, share) for numbers in history if (share := signal_share(numbers.metrics)) is not None]
    window = window[-WINDOW_STEPS:]
    if len(window) < WINDOW_STEPS or not _is_newest(window[-1:], history):
        return
    if all(share < SIGNAL_SHARE for _, share in window):
        message = f"{_mean(window):.1%} of the groups had a signal over {_span(window)}"
        yield Suspicion(name=AlarmName.ZERO_SIGNAL, message=message, steps=_steps(window))


def length_reward(history: Sequence[StepNumbers]) -> Iterator[Suspicion]:
    """Answers grow, and length goes with reward, or against it, within the groups."""
    _, window = _base_and_window(history, "length_reward_correlation")
    base_length, lengths = _base_and_window(history, "completion_tokens_mean")
    if not window or not base_length or _mean(lengths) < LENGTH_GROWTH * base_length:
        return
    if abs(_mean(window)) > LENGTH_CORRELATION:
        message = (
            f"correlation of length and reward {_mean(window):+.2f} over {_span(window)}, while lengths grew from "
            f"{base_length:.0f} to {_mean(lengths):.0f} tokens"
        )
        yield Suspicion(name=AlarmName.LENGTH_REWARD, message=message, steps=_steps(window))


DETECTORS: tuple[Callable[[Sequence[StepNumbers]], Iterator[Suspicion]], ...] = (
    entropy_collapse,
    gradient_spike,
    mismatch_drift,
    likelihood_collapse,
    zero_signal,
    length_reward,
)


def resumed_steps(run: Mapping[str, Any] | None) -> set[int]:
    """Steps after whose alarms somebody let the trainer go on (`agentrl resume`), by the Run document."""
    return {int(entry["step"]) for entry in (run or {}).get("resumed", ())}


def length_reward_correlation(groups: Sequence[Sequence[tuple[float, float]]]) -> float | None:
    """Correlation of (length, reward) within groups, over all of them; None where one of both does not vary.

    Each is taken relative to its group's mean, so that hard tasks with long answers say nothing.
    """
    pairs: list[tuple[float, float]] = []
    for group in groups:
        if len(group) > 1:
            mean_length, mean_reward = fmean(length for length, _ in group), fmean(reward for _, reward in group)
            pairs += [(length - mean_length, reward - mean_reward) for length, reward in group]
    scale = math.sqrt(sum(x * x for x, _ in pairs) * sum(y * y for _, y in pairs))
    return sum(x * y for x, y in pairs) / scale if scale > 1e-12 else None


def signal_share(metrics: Mapping[str, float]) -> float | None:
    """Share of groups with a signal, those dropped for lack of one without a step included."""
    if "group_signal_share" not in metrics:
        return None
    taken = metrics.get("num_groups", 0.0)
    silent = sum(metrics.get(f"num_dropped_{reason}", 0.0) for reason in SILENT_REASONS)
    return metrics["group_signal_share"] * taken / (taken + silent) if taken else None


def _series(history: Sequence[StepNumbers], name: str) -> list[tuple[int, float]]:
    return [
        (numbers.step, numbers.metrics[name])
        for numbers in history
        if name in numbers.metrics and math.isfinite(numbers.metrics[name])
    ]


def _base_and_window(history: Sequence[StepNumbers], name: str) -> tuple[float | None, Series]:
    """Median of the run's first numbers and the newest ones; nothing while they overlap or the newest is missing."""
    series = _series(history, name)
    if len(series) < BASE_STEPS + WINDOW_STEPS or not _is_newest(series[-1:], history):
        return None, []
    return median(value for _, value in series[:BASE_STEPS]), series[-WINDOW_STEPS:]


def _is_newest(last: Series, history: Sequence[StepNumbers]) -> bool:
    return bool(last) and bool(history) and last[0][0] == history[-1].step


def _mean(window: Series) -> float:
    return fmean(value for _, value in window)


def _steps(window: Series) -> tuple[int, ...]:
    return tuple(step for step, _ in window)


def _span(window: Series) -> str:
    return f"steps {window[0][0]} to {window[-1][0]}"
