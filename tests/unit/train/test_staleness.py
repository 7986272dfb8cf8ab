"""The hard staleness bound under load: a run in virtual time through the real admission rule, planner and store."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from staleness_simulation import Measurement, Scenario, measure, modes

SIGMAS = (0.3, 0.8)
TRAIN_TIME = 20.0
BOUNDS = {"sync": 0, "one step off": 1, "async K = 1": 1, "async K = 2": 2, "async K = 4": 4}


@cache
def measured(sigma: float) -> dict[str, Measurement]:
    scenarios = modes(sigma=sigma, train_time=TRAIN_TIME, num_steps=45, num_warmup_steps=5)
    return {mode: measure(scenario) for mode, scenario in scenarios.items()}


def test_equal_arguments_give_equal_runs_and_another_seed_another() -> None:
    scenario = Scenario(max_staleness=1, sigma=0.8, num_steps=12, num_warmup_steps=2)
    assert measure(scenario) == measure(scenario)
    assert measure(scenario) != measure(replace(scenario, seed=1))


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize(
    ("mode", "bound"), [("sync", 0), ("one step off", 1)] + [(f"async K = {k}", k) for k in (1, 2, 4)]
)
def test_no_token_older_than_the_bound_is_trained(sigma: float, mode: str, bound: int) -> None:
    run = measured(sigma)[mode]
    assert run.num_trained == 40 * 32
    assert min(run.staleness) >= 0
    assert max(run.staleness) <= bound


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_the_bound_holds_where_most_groups_are_overtaken(bound: int) -> None:
    scenario = Scenario(max_staleness=bound, sigma=2.0, train_time=2.0, num_steps=30, num_warmup_steps=1)
    run = measure(scenario)
    assert max(run.staleness) <= bound
    if bound:
        assert run.num_aged_out > 0  # the bound had something to do


@pytest.mark.parametrize("sigma", SIGMAS)
def test_each_mode_is_faster_than_the_one_before(sigma: float) -> None:
    times = [run.time_per_step for run in measured(sigma).values()]
    assert times == sorted(times, reverse=True)
    assert times[-1] >= TRAIN_TIME - 1e-6  # the trainer is the limit then


@pytest.mark.parametrize(("sigma", "speed_up"), [(0.3, 1.8), (0.8, 2.8)])
def test_a_bound_of_one_pays_against_sampling_and_training_in_turns(sigma: float, speed_up: float) -> None:
    run = measured(sigma)["async K = 1"]
    assert measured(sigma)["sync"].time_per_step / run.time_per_step >= speed_up


@pytest.mark.parametrize("sigma", SIGMAS)
def test_little_work_ages_out(sigma: float) -> None:
    runs = measured(sigma)
    assert all(run.aged_out_share <= 0.15 for run in runs.values())
    assert runs["sync"].num_aged_out == runs["one step off"].num_aged_out == 0


def test_the_trainer_idles_less_the_more_staleness_is_allowed() -> None:
    idle = [measured(0.8)[mode].idle_share for mode in ("sync", "async K = 1", "async K = 2", "async K = 4")]
    assert idle == sorted(idle, reverse=True)
    assert idle[-1] < 0.05
