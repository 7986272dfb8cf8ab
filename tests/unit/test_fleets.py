"""A fleet's documents as values: what was used, when a budget is spent, what a weight label says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.fleets import FleetRun, FleetUsage, read_weight_label, weight_label

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,20}", fullmatch=True)


@given(versions=st.dictionaries(NAMES, st.integers(0, 10_000), min_size=1, max_size=6))
def test_a_weight_label_tells_every_run_its_version(versions: dict[str, int]) -> None:
    assert read_weight_label(weight_label(versions)) == versions


@pytest.mark.parametrize("label", ["", "default", "3", "a=", "=3", "a=3,", "a=-1", "a=3,b", "a=x"])
def test_other_labels_are_nobodys(label: str) -> None:
    assert read_weight_label(label) is None


def test_usage_is_the_sum_over_the_processes() -> None:
    usage = {
        "p1": FleetUsage(num_tasks=2, num_tokens=30, virtual_time=1.0),
        "p2": FleetUsage(num_tasks=1, num_tokens=5, virtual_time=0.5),
    }
    run = FleetRun(name="a", offset=10.0, usage=usage)
    assert (run.num_tasks, run.num_tokens, run.virtual_time) == (3, 35, 11.5)


@pytest.mark.parametrize(
    ("budgets", "spent"),
    [
        ({}, None),
        ({"budget_tasks": 3}, None),
        ({"budget_tasks": 2}, "budget_tasks = 2 is used up"),
        ({"budget_tokens": 31}, None),
        ({"budget_tokens": 30}, "budget_tokens = 30 is used up (30 sampled)"),
    ],
)
def test_a_budget_is_spent_when_nothing_is_left_of_it(budgets: dict[str, int], spent: str | None) -> None:
    run = FleetRun(name="a", usage={"p": FleetUsage(num_tasks=2, num_tokens=30)}, **budgets)
    assert run.spent_budget == spent
