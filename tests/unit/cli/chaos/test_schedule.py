from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.cli.chaos.schedule import (
    KINDS,
    Action,
    Kind,
    PlannedFault,
    Target,
    available_kinds,
    choose_kinds,
    num_processes,
    schedule,
)
from agentrl.config import RunConfig
from agentrl.errors import ConfigError

SEEDS = st.integers(min_value=0, max_value=2**31)
KIND_LISTS = st.lists(st.sampled_from(KINDS), min_size=1, unique=True)
COUNTS = {Target.SAMPLER: 3, Target.TRAINER: 2}
GOLDEN_SEED_7 = [("kill-trainer", 0, 2), ("repeat-turn", 0, 1), ("pause-launcher", 0, 1), ("pause-database", 0, 2)]


def first_faults(number: int, *, seed: int, kinds=KINDS, lease_s: float = 10.0) -> list[PlannedFault]:
    return list(islice(schedule(seed, kinds=kinds, num_processes=COUNTS, lease_s=lease_s), number))


def config(**sections: dict[str, object]) -> RunConfig:
    return RunConfig.model_validate({"tools": {"mcp_config": "mcp.json"}, **sections})


@given(SEEDS, KIND_LISTS, st.integers(1, 60))
def test_a_seed_decides_the_whole_schedule(seed, kinds, number):
    schedules = [first_faults(number, seed=seed, kinds=kinds) for _ in range(2)]
    assert schedules[0] == schedules[1]
    assert first_faults(number + 7, seed=seed, kinds=kinds)[:number] == schedules[0]


@given(SEEDS, KIND_LISTS)
def test_every_kind_comes_once_before_one_comes_again(seed, kinds):
    faults = first_faults(3 * len(kinds), seed=seed, kinds=kinds)
    for start in range(0, len(faults), len(kinds)):
        assert {fault.kind for fault in faults[start : start + len(kinds)]} == set(kinds)
    assert [fault.index for fault in faults] == [*range(len(faults))]


@given(SEEDS, st.floats(0.5, 60))
def test_a_pause_is_shorter_and_a_freeze_longer_than_a_lease(seed, lease_s):
    for fault in first_faults(2 * len(KINDS), seed=seed, lease_s=lease_s):
        assert 0 <= fault.after_s <= lease_s
        assert 0 <= fault.victim < COUNTS.get(fault.kind.target, 1)
        if fault.kind.action is Action.PAUSE:
            assert 0 < fault.held_s < lease_s
        elif fault.kind.action is Action.FREEZE:
            assert fault.held_s > lease_s
        elif fault.kind.action in {Action.KILL, Action.REPEAT, Action.LATE, Action.FULL}:
            assert fault.held_s == 0


def test_the_schedule_of_a_seed_stays_the_same_from_release_to_release():
    assert [(fault.kind.name, fault.victim, fault.after_steps) for fault in first_faults(4, seed=7)] == GOLDEN_SEED_7


def test_different_seeds_give_different_schedules():
    orders = {tuple(fault.kind.name for fault in first_faults(len(KINDS), seed=seed)) for seed in range(20)}
    assert len(orders) == 20


def test_kinds_can_be_named_by_kind_action_or_target():
    chosen = choose_kinds("late-claim, kill,connection,kill-engine", available=KINDS)
    assert [kind.name for kind in chosen] == [
        "late-claim",
        *(f"kill-{name}" for name in ("sampler", "engine", "trainer", "database", "tool", "launcher")),
        *(f"{name}-connection" for name in ("slow", "reset", "blackhole")),
    ]
    assert choose_kinds(None, available=KINDS) == KINDS


def test_a_word_that_names_no_fault_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"'kill-engin' is no kind.*did you mean kill-engine"):
        choose_kinds("kill-engin", available=KINDS)


def test_a_database_of_others_is_left_alone():
    foreign = config(store={"db_connection_string": "mongodb://h/"})
    targets = {kind.target for kind in available_kinds(foreign)}
    assert targets.isdisjoint({Target.DATABASE, Target.CONNECTION})
    with pytest.raises(ConfigError, match="'kill-database': this run has no such process of its own"):
        choose_kinds("kill-database", available=available_kinds(foreign))


def test_a_supervised_run_has_no_rollouts_to_disturb():
    kinds = available_kinds(config(loss={"loss": "CROSS_ENTROPY"}))
    assert Kind(action=Action.KILL, target=Target.TRAINER) in kinds
    assert {kind.target for kind in kinds}.isdisjoint({Target.SAMPLER, Target.ENGINE, Target.TOOL, Target.CLAIM})


def test_victims_are_counted_as_the_launch_starts_them():
    counts = num_processes(config(rollout={"num_samplers": 3}, train={"num_processes": 2}))
    assert counts == {Target.SAMPLER: 3, Target.TOOL: 3, Target.TRAINER: 2, Target.DISK: 2}
