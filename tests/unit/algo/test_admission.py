from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algo.admission import groups_to_admit

Counts = st.integers(0, 200)


@given(Counts, Counts, st.integers(1, 64), st.integers(0, 8))
def test_never_more_than_the_bound_or_the_room_allows_and_never_less_than_both(
    num_outstanding: int, num_free: int, tasks_per_step: int, max_staleness: int
) -> None:
    admitted = groups_to_admit(
        num_outstanding=num_outstanding,
        num_free=num_free,
        tasks_per_step=tasks_per_step,
        max_staleness=max_staleness,
    )
    bound = (max_staleness + 1) * tasks_per_step
    assert 0 <= admitted <= num_free
    assert num_outstanding + admitted <= max(bound, num_outstanding)
    assert admitted in {num_free, max(0, bound - num_outstanding)}


@pytest.mark.parametrize(
    ("num_outstanding", "expected"), [(0, 12), (20, 4), (24, 0), (30, 0)], ids=["room", "bound", "full", "over"]
)
def test_two_steps_of_twelve_may_be_outstanding_at_a_staleness_of_one(num_outstanding: int, expected: int) -> None:
    admitted = groups_to_admit(num_outstanding=num_outstanding, num_free=12, tasks_per_step=12, max_staleness=1)
    assert admitted == expected
