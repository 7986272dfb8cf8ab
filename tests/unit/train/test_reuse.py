"""Groups that are trained more than once: how often, how far apart, how fresh, and what a kill does to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl.config import AlgoConfig, RolloutConfig, RunConfig
from agentrl.store import MemoryStore
from agentrl.train.planner import StepPlanner
from agentrl.train.reuse import RETIRED, Reuse, is_stale
from agentrl.types import (
    GroupOutcome,
    GroupSettlement,
    SequenceSummary,
    SettledGroup,
    StepStatus,
    TaskStatus,
    TrainStep,
)
from factories import EPOCH_START, make_sequence, make_settlement, make_task
from staleness_simulation import DirectFeed, Scenario, finish, measure


def group(name: str, *versions: int) -> SettledGroup:
    """A group of one row for each version, of version 0 if none is given."""
    rows = tuple(
        SequenceSummary(id=f"{name}/g{k}/s0", num_tokens=4, num_trained_tokens=2, min_policy_version=version)
        for k, version in enumerate(versions or (0,))
    )
    settlement = GroupSettlement(task_id=name, outcome=GroupOutcome.TRAINABLE, rewards={}, advantages={})
    return SettledGroup(settlement=settlement, sequences=rows, settled_at=EPOCH_START)


def entry(step: int, *names: str, dropped: Sequence[str] = ()) -> TrainStep:
    return TrainStep(
        step=step,
        status=StepStatus.COMMITTED,
        policy_version=step - 1,
        task_ids=(*names, *dropped),
        sequence_ids=(),
        dropped=dict.fromkeys(dropped, "zero_advantage"),
    )


def rule(step: int, *history: TrainStep, count: int = 2, interval: int = 1, max_staleness: int = 3) -> Reuse:
    return Reuse(
        step=step,
        max_trained_count=count,
        retrained_interval=interval,
        max_staleness=max_staleness,
        history=history,
    )


def names(groups: Sequence[SettledGroup]) -> list[str]:
    return [each.settlement.task_id for each in groups]


@pytest.mark.parametrize(
    ("versions", "expected"), [((3, 5), False), ((2, 5), True), ((-1, 4), False)], ids=["at bound", "older", "masked"]
)
def test_one_token_beyond_the_bound_makes_a_group_stale(versions: tuple[int, int], expected: bool) -> None:
    assert is_stale(group("a", *versions), policy_version=5, max_staleness=2) is expected


def test_new_groups_come_first_and_then_those_trained_least_often() -> None:
    reuse = rule(4, entry(2, "a", "b"), entry(3, "a"), count=3)
    assert names(reuse.usable([group("a"), group("b"), group("c"), group("d")])) == ["c", "d", "b", "a"]


def test_a_group_is_due_again_only_after_the_interval_and_below_the_count() -> None:
    history = [entry(2, "a"), entry(3, "b")]
    assert names(rule(4, *history, interval=2).usable([group("a"), group("b")])) == ["a"]
    assert names(rule(5, *history, entry(4, "a"), interval=2).usable([group("a"), group("b")])) == ["b"]


def test_a_step_that_dropped_a_group_did_not_train_it() -> None:
    assert rule(4, entry(3, dropped=["a"])).steps_of_groups == {}


def test_a_group_is_retained_only_while_it_will_be_fresh_enough_when_it_is_due() -> None:
    groups = [group("old", 1), group("new", 2)]
    assert rule(4, interval=1, max_staleness=2).retained(groups) == ["new"]  # step 5 trains v4: at least v2
    assert rule(4, interval=2, max_staleness=2).retained(groups) == []
    assert rule(4, entry(3, "new"), interval=1, max_staleness=2).retained(groups) == []  # that is its second time
    assert rule(4, count=1).retained(groups) == []


def test_only_trained_groups_are_retired() -> None:
    groups = [group("trained", 0), group("never", 0)]
    assert rule(4, entry(2, "trained"), max_staleness=2).retired(groups, step=4) == ["trained"]
    assert rule(3, entry(2, "trained"), max_staleness=2).retired(groups, step=3) == []


def test_a_bound_that_makes_retraining_impossible_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"max_trained_count = 2: 2 steps later .* max_staleness = 1; raise"):
        AlgoConfig(max_trained_count=2, retrained_interval=2, max_staleness=1)
    AlgoConfig(max_trained_count=1, retrained_interval=9, max_staleness=0)
    with pytest.raises(ValidationError, match="max_staleness = 0"):
        RunConfig(rollout=RolloutConfig(sync_sampling=True), algo=AlgoConfig(max_trained_count=2)).model_validate(
            {"rollout": {"sync_sampling": True}, "algo": {"max_trained_count": 2}}
        )


# --- whole runs in virtual time ---------------------------------------------------------------------------------------

SLOW_ENGINES = {"median_latency": 60.0, "num_steps": 30, "num_warmup_steps": 2, "sigma": 0.5}


@pytest.mark.parametrize(("count", "interval", "max_staleness"), [(2, 1, 2), (3, 1, 4), (2, 2, 3), (4, 2, 4)])
def test_no_group_is_trained_more_often_sooner_or_older_than_allowed(
    count: int, interval: int, max_staleness: int
) -> None:
    run = measure(
        Scenario(max_staleness=max_staleness, max_trained_count=count, retrained_interval=interval, **SLOW_ENGINES)
    )
    assert max(run.staleness) <= max_staleness
    times = run.steps_of_groups.values()
    assert max(map(len, times)) <= count
    assert any(len(steps) > 1 for steps in times)
    assert all(later - earlier >= interval for steps in times for earlier, later in pairwise(steps))


def test_training_groups_again_keeps_the_trainer_busy_where_engines_are_slow() -> None:
    once = measure(Scenario(max_staleness=2, **SLOW_ENGINES))
    twice = measure(Scenario(max_staleness=2, max_trained_count=2, **SLOW_ENGINES))
    assert twice.idle_share < once.idle_share
    assert twice.time_per_step < 0.8 * once.time_per_step


def test_fast_engines_always_have_new_groups_so_none_is_trained_again() -> None:
    settings = {"median_latency": 1.0, "sigma": 0.1, "num_steps": 15, "num_warmup_steps": 2, "max_staleness": 2}
    run = measure(Scenario(max_trained_count=3, **settings))
    assert all(len(steps) == 1 for steps in run.steps_of_groups.values())


@pytest.mark.parametrize("sigma", [0.3, 1.5])
def test_a_count_of_one_is_exactly_a_run_without_the_setting(sigma: float) -> None:
    settings = {"max_staleness": 2, "sigma": sigma, "num_steps": 12, "num_warmup_steps": 2}
    assert measure(Scenario(**settings)) == measure(Scenario(max_trained_count=1, retrained_interval=2, **settings))


# --- kill and resume ------------------------------------------------------------------------------------------------


def planner_of(store: MemoryStore) -> StepPlanner:
    config = RunConfig(
        rollout=RolloutConfig(num_generations=2),
        algo=AlgoConfig(tasks_per_step=2, max_staleness=3, max_trained_count=3, retrained_interval=1),
    )
    return StepPlanner(DirectFeed(store), config=config, num_ranks=1, report=lambda phase, step: None)  # type: ignore[arg-type]  # same calls


def settle(store: MemoryStore, name: str, *, version: int) -> None:
    task = make_task(name)
    finish(store.insert_tasks([task]))
    (claim,) = finish(store.claim_tasks(split="train", owner="w", lease_s=60, limit=1))
    rows = [make_sequence(record, version=version) for record in finish(store.open_records(claim))]
    finish(store.settle_task(claim, make_settlement(task), rows))


def commit(store: MemoryStore, plan: TrainStep) -> None:
    finish(store.commit_step(replace(plan, status=StepStatus.COMMITTED)))


@given(st.lists(st.sampled_from(["none", "after plan", "after commit", "back to the start"]), min_size=6, max_size=6))
def test_kills_change_neither_what_is_planned_nor_what_is_left(kills: list[str]) -> None:
    def run(kills: Sequence[str]) -> tuple[list[TrainStep], dict[TaskStatus, int]]:
        store = MemoryStore()
        planner = planner_of(store)
        for step, kill in enumerate(kills, start=1):
            if step % 2:
                settle(store, f"q{step}a", version=step - 1)
                settle(store, f"q{step}b", version=step - 1)
            plan = planner.plan(step).entry
            if kill == "after plan":
                planner = planner_of(store)
                assert planner.plan(step).entry.task_ids == plan.task_ids
            commit(store, plan)
            if kill == "after commit":
                planner = planner_of(store)
                commit(store, planner.plan(step).entry)
            if kill == "back to the start":
                planner = planner_of(store)
                for earlier in range(1, step + 1):
                    commit(store, planner.plan(earlier).entry)
        steps = finish(store.list_steps())
        facts = [(each.step, each.task_ids, each.sequence_ids, each.retained) for each in steps]
        return facts, finish(store.count_tasks(split="train"))

    assert run(kills) == run(["none"] * len(kills))


def test_a_retained_group_stays_settled_and_is_retired_when_it_is_too_old() -> None:
    store = MemoryStore()
    planner = planner_of(store)
    settle(store, "q1", version=0)
    settle(store, "q2", version=0)
    first = planner.plan(1).entry
    commit(store, first)
    assert set(first.retained) == set(first.task_ids)
    assert finish(store.count_tasks(split="train"))[TaskStatus.SETTLED] == 2
    for step in (2, 3, 4, 5):
        settle(store, f"q{step}a", version=step - 1)
        settle(store, f"q{step}b", version=step - 1)
        plan = planner.plan(step).entry
        assert not set(plan.task_ids) & set(first.task_ids)  # there are new ones
        assert plan.metrics["num_retrained"] == 0
        commit(store, plan)
    (state,) = finish(store.find_tasks(["train:0:q1"]))
    assert (state.status, state.drop_reason, state.consumed_step) == (TaskStatus.CONSUMED, RETIRED, None)
    steps = finish(store.list_steps())
    assert sum(step.metrics.get("num_dropped_retired", 0) for step in steps) >= 2
    assert all("num_dropped_stale" not in step.metrics for step in steps)
