from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from agentrl.algo.watch import (
    BASE_STEPS,
    HISTORY_STEPS,
    QUIET_STEPS,
    AlarmName,
    StepNumbers,
    length_reward_correlation,
    look,
    signal_share,
)


def healthy(step: int, *, num_steps: int, seed: int = 0) -> dict[str, float]:
    """A run that learns: reward and log-probs rise, entropy and the share of groups with a signal fall."""
    rng = random.Random(f"{seed}/{step}")
    progress = step / num_steps
    return {
        "reward": 0.3 + 0.6 * progress + rng.uniform(-0.05, 0.05),
        "entropy": 0.4 * (1 - 0.85 * progress) * rng.uniform(0.8, 1.2),
        "grad_norm": 0.5 * math.exp(rng.gauss(0.0, 0.35)),
        "mismatch": 4e-7 * rng.uniform(0.5, 2.0),
        "positive_logprob_mean": -0.4 + 0.3 * progress + rng.uniform(-0.05, 0.05),
        "group_signal_share": max(0.15, 0.9 - 0.6 * progress),
        "num_groups": 16.0,
        "length_reward_correlation": rng.uniform(-0.8, 0.8),
        "completion_tokens_mean": 30 + 25 * progress,
    }


def watch(
    numbers: Callable[[int], Mapping[str, float]], *, num_steps: int = 40
) -> list[tuple[int, AlarmName, tuple[int, ...]]]:
    """Every alarm of a whole run, looked at step by step as the trainer does."""
    history: list[StepNumbers] = []
    raised: dict[str, int] = {}
    found = []
    for step in range(1, num_steps + 1):
        history.append(StepNumbers(step=step, metrics=numbers(step)))
        history = [n for n in history if n.step <= BASE_STEPS or n.step > step - HISTORY_STEPS]
        for suspicion in look(history, raised=raised):
            raised[suspicion.name.value] = step
            found.append((step, suspicion.name, suspicion.steps))
    return found


@hypothesis_settings(max_examples=30)
@given(seed=st.integers(0, 10**6), num_steps=st.sampled_from([5, 40, 120]))
def test_a_run_that_learns_raises_nothing(seed: int, num_steps: int) -> None:
    assert watch(lambda step: healthy(step, num_steps=num_steps, seed=seed), num_steps=num_steps) == []


def falling(step: int, *, start: int, rate: float) -> float:
    return math.exp(-rate * max(0, step - start))


COLLAPSES: dict[AlarmName, Callable[[int], Mapping[str, float]]] = {
    AlarmName.ENTROPY_COLLAPSE: lambda step: {"entropy": 0.4 * falling(step, start=15, rate=0.5)},
    AlarmName.GRADIENT_SPIKE: lambda step: {"grad_norm": 400.0 if step == 25 else 0.5},
    AlarmName.MISMATCH_DRIFT: lambda step: {"mismatch": 4e-7 / falling(step, start=15, rate=1.0)},
    AlarmName.LIKELIHOOD_COLLAPSE: lambda step: {"positive_logprob_mean": -0.3 - 0.1 * max(0, step - 15)},
    AlarmName.ZERO_SIGNAL: lambda step: {"group_signal_share": 0.0 if step > 20 else 0.6},
    AlarmName.LENGTH_REWARD: lambda step: {
        "length_reward_correlation": 0.9,
        "completion_tokens_mean": 30.0 * (1 + max(0, step - 15) / 10),
    },
}


@hypothesis_settings(max_examples=10)
@given(seed=st.integers(0, 10**6))
@pytest.mark.parametrize("name", COLLAPSES)
def test_each_collapse_raises_its_own_alarm_and_no_other(name: AlarmName, seed: int) -> None:
    found = watch(lambda step: {**healthy(step, num_steps=40, seed=seed), **COLLAPSES[name](step)})
    assert {alarm for _, alarm, _ in found} == {name}
    first, _, steps = found[0]
    assert 16 <= first <= 35
    assert steps[-1] == first
    assert min(steps) > first - 6


def test_an_alarm_is_not_repeated_while_it_is_fresh() -> None:
    found = watch(
        lambda step: {**healthy(step, num_steps=60), **COLLAPSES[AlarmName.ENTROPY_COLLAPSE](step)}, num_steps=60
    )
    steps = [step for step, _, _ in found]
    assert len(steps) > 1
    assert {later - earlier for earlier, later in itertools.pairwise(steps)} == {QUIET_STEPS}


def test_a_steady_gradient_may_double_and_a_noisy_one_may_wander() -> None:
    assert watch(lambda step: {"grad_norm": 1.0 if step == 30 else 0.5}) == []
    noise = random.Random(3)
    norms = [math.exp(noise.gauss(0, 0.8)) for _ in range(41)]
    assert watch(lambda step: {"grad_norm": norms[step]}) == []


def test_numbers_a_step_lacks_or_that_are_not_finite_are_not_looked_at() -> None:
    assert watch(lambda step: {}) == []
    assert watch(lambda step: {"entropy": math.nan, "grad_norm": math.inf, "mismatch": -math.inf}) == []
    assert look([], raised={}) == []


@given(
    series=st.lists(
        st.dictionaries(
            st.sampled_from(
                [
                    "entropy",
                    "grad_norm",
                    "mismatch",
                    "positive_logprob_mean",
                    "group_signal_share",
                    "num_groups",
                    "num_dropped_zero_advantage",
                    "length_reward_correlation",
                    "completion_tokens_mean",
                ]
            ),
            st.floats(allow_nan=True, allow_infinity=True, width=32),
        ),
        max_size=40,
    )
)
def test_no_numbers_whatever_make_the_watch_itself_fail(series: list[dict[str, float]]) -> None:
    watch(lambda step: series[step - 1], num_steps=len(series))


def test_groups_dropped_without_a_step_count_as_silent_and_stale_ones_do_not() -> None:
    metrics = {
        "group_signal_share": 0.5,
        "num_groups": 4.0,
        "num_dropped_zero_advantage": 6.0,
        "num_dropped_stale": 9.0,
    }
    assert signal_share(metrics) == pytest.approx(0.2)
    assert signal_share({}) is None


def test_length_and_reward_are_compared_within_groups() -> None:
    easy_and_short, hard_and_long = [(10.0, 1.0), (12.0, 0.9)], [(100.0, 0.1), (102.0, 0.0)]
    assert length_reward_correlation([easy_and_short, hard_and_long]) == pytest.approx(-1.0)
    assert length_reward_correlation([[(10.0, 0.0), (20.0, 1.0)]]) == pytest.approx(1.0)
    assert length_reward_correlation([[(10.0, 1.0), (20.0, 1.0)], [(5.0, 0.0)]]) is None
    assert length_reward_correlation([]) is None
