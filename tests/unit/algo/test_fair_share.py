"""The schedule of a fleet: shares, priorities, credit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algo.fair_share import CREDIT_TASKS, Contender, choose_run, lifted

SHARES = st.lists(st.integers(1, 20), min_size=2, max_size=6)


def contender(name: str, **fields: object) -> Contender:
    values = {"share": 1.0, "priority": 0, "virtual_time": 0.0, "wants": True, "is_served": True, **fields}
    return Contender(name=name, **values)  # type: ignore[arg-type]


class Schedule:
    """Grants Tasks as a sampler does, and counts them."""

    def __init__(self, *contenders: Contender) -> None:
        self.runs = {run.name: run for run in contenders}
        self.granted = dict.fromkeys(self.runs, 0)

    def change(self, name: str, **fields: object) -> None:
        self.runs[name] = replace(self.runs[name], **fields)  # type: ignore[arg-type]

    def grant(self, count: int) -> None:
        for _ in range(count):
            for name, virtual_time in lifted(list(self.runs.values())).items():
                self.change(name, virtual_time=virtual_time, is_new=False)
            name = choose_run(list(self.runs.values()))
            if name is None:
                return
            self.granted[name] += 1
            self.change(name, virtual_time=self.runs[name].virtual_time + 1 / self.runs[name].share)


@settings(max_examples=100, deadline=None)
@given(shares=SHARES, num_tasks=st.integers(1, 300))
def test_runs_with_work_are_never_two_tasks_away_from_their_shares(shares: list[int], num_tasks: int) -> None:
    schedule = Schedule(*(contender(f"r{index}", share=float(share)) for index, share in enumerate(shares)))
    schedule.grant(num_tasks)
    for index, share in enumerate(shares):
        assert abs(schedule.granted[f"r{index}"] - num_tasks * share / sum(shares)) < len(shares)
    assert sum(schedule.granted.values()) == num_tasks


@settings(max_examples=100, deadline=None)
@given(shares=SHARES, idle_for=st.integers(1, 300), after=st.integers(1, 200))
def test_a_run_that_had_no_work_catches_up_a_few_tasks_at_most(shares: list[int], idle_for: int, after: int) -> None:
    schedule = Schedule(*(contender(f"r{index}", share=float(share)) for index, share in enumerate(shares)))
    schedule.change("r0", wants=False)
    schedule.grant(idle_for)
    schedule.change("r0", wants=True)
    schedule.grant(after)
    assert schedule.granted["r0"] <= after * shares[0] / sum(shares) + 2 * CREDIT_TASKS + len(shares)


@settings(max_examples=100, deadline=None)
@given(shares=SHARES, before=st.integers(1, 300), after=st.integers(1, 200))
def test_a_run_that_joins_late_gets_its_share_from_then_on(shares: list[int], before: int, after: int) -> None:
    late = contender("late", share=float(shares[0]), is_new=True)
    schedule = Schedule(*(contender(f"r{index}", share=float(share)) for index, share in enumerate(shares)))
    schedule.grant(before)
    schedule.runs["late"], schedule.granted["late"] = late, 0
    schedule.grant(after)
    expected = after * shares[0] / (sum(shares) + shares[0])
    assert abs(schedule.granted["late"] - expected) <= len(shares) + 2


@given(virtual_times=st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)))
def test_a_higher_priority_always_goes_first(virtual_times: tuple[float, float]) -> None:
    low = contender("low", virtual_time=virtual_times[0])
    high = contender("high", priority=1, virtual_time=virtual_times[1])
    assert choose_run([low, high]) == "high"
    assert choose_run([low, replace(high, wants=False)]) == "low"
    assert choose_run([low, replace(high, is_served=False)]) == "low"


def test_a_run_that_waits_for_its_weights_keeps_its_credit() -> None:
    schedule = Schedule(contender("a"), contender("b", is_served=False))
    schedule.grant(100)
    schedule.change("b", is_served=True)
    schedule.grant(100)
    assert schedule.granted == {"a": 100, "b": 100}


def test_a_run_behind_a_higher_priority_keeps_a_bounded_credit() -> None:
    schedule = Schedule(contender("first", priority=1), contender("low"))
    schedule.grant(1000)
    assert schedule.granted == {"first": 1000, "low": 0}
    schedule.change("low", priority=1)
    schedule.grant(100)
    assert schedule.granted["low"] <= 50 + 2 * CREDIT_TASKS


def test_changing_a_share_changes_what_is_granted_from_then_on() -> None:
    schedule = Schedule(contender("a"), contender("b"))
    schedule.grant(100)
    schedule.change("b", share=3.0)
    schedule.grant(100)
    assert schedule.granted["b"] == pytest.approx(50 + 75, abs=2)


def test_nobody_is_chosen_where_nobody_can_be_served() -> None:
    assert choose_run([]) is None
    assert choose_run([contender("a", wants=False), contender("b", is_served=False)]) is None
