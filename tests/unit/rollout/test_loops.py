"""Loops inside one completion."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentrl.rollout.loops import LONGEST_RUN_TOKENS, SHORTEST_LOOP_TOKENS, loop_repeats


@given(
    head=st.lists(st.integers(100, 200), max_size=50),
    run=st.lists(st.integers(0, 99), min_size=1, max_size=LONGEST_RUN_TOKENS, unique=True),
    repeats=st.integers(2, 20),
)
def test_the_repeats_of_a_run_at_the_end_are_counted(head: list[int], run: list[int], repeats: int) -> None:
    is_long_enough = len(run) * repeats >= SHORTEST_LOOP_TOKENS
    assert loop_repeats([*head, *run * repeats]) == (repeats if is_long_enough else 0)


@given(st.lists(st.integers(0, 10_000), unique=True, max_size=300))
def test_a_text_that_says_nothing_twice_has_no_loop(ids: list[int]) -> None:
    assert loop_repeats(ids) == 0


def test_a_loop_cut_in_the_middle_of_its_run_counts_whole_repeats() -> None:
    assert loop_repeats([1, 2, 3] * 20 + [1, 2]) == 20


def test_a_loop_that_the_model_left_again_is_none() -> None:
    assert loop_repeats([1, 2, 3] * 20 + [9, 8]) == 0
