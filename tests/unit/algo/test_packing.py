from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algo.layouts import Bundle, LayoutRule, RowLayout
from agentrl.algo.packing import plan_groups, plan_micro_batches, step_cost
from agentrl.types import SequenceSummary


def summary(name: str, length: int, *, shared: int = 0) -> SequenceSummary:
    return SequenceSummary(
        id=name, num_tokens=length, num_trained_tokens=1, min_policy_version=0, num_shared_tokens=shared
    )


def rows(lengths: list[int]) -> list[Bundle]:
    """One bundle per row."""
    return [
        Bundle(
            row_ids=(f"r{index:03d}",),
            num_tokens=length,
            cost=LayoutRule().row(summary("r", length)),
            layout=RowLayout.LINEAR,
        )
        for index, length in enumerate(lengths)
    ]


def tokens(bundles: tuple[Bundle, ...]) -> int:
    return sum(bundle.num_tokens for bundle in bundles)


lengths_of_a_step = st.lists(st.integers(1, 130), max_size=40)
num_ranks_drawn = st.integers(1, 5)


@given(lengths=lengths_of_a_step, num_ranks=num_ranks_drawn)
def test_every_sequence_is_planned_exactly_once(lengths: list[int], num_ranks: int) -> None:
    plan = plan_micro_batches(rows(lengths), num_ranks=num_ranks, max_tokens=100)
    planned = list(chain.from_iterable(chain.from_iterable(plan)))
    assert sorted(planned, key=lambda one: one.row_ids) == rows(lengths)


@given(lengths=lengths_of_a_step, num_ranks=num_ranks_drawn)
def test_micro_batches_keep_the_budget_and_longer_sequences_sit_alone(lengths: list[int], num_ranks: int) -> None:
    for micro_batch in chain.from_iterable(plan_micro_batches(rows(lengths), num_ranks=num_ranks, max_tokens=100)):
        assert tokens(micro_batch) <= 100 or len(micro_batch) == 1


@given(lengths=lengths_of_a_step, num_ranks=num_ranks_drawn)
def test_every_rank_has_equally_many_micro_batches(lengths: list[int], num_ranks: int) -> None:
    plan = plan_micro_batches(rows(lengths), num_ranks=num_ranks, max_tokens=100)
    assert len(plan) == num_ranks
    assert len({len(rank) for rank in plan}) == 1


@given(lengths=lengths_of_a_step, num_ranks=num_ranks_drawn)
def test_no_more_than_one_row_of_micro_batches_has_empty_ones(lengths: list[int], num_ranks: int) -> None:
    plan = plan_micro_batches(rows(lengths), num_ranks=num_ranks, max_tokens=100)
    filler = [index for rank in plan for index, micro_batch in enumerate(rank) if not micro_batch]
    assert len(filler) < num_ranks
    assert set(filler) <= {len(plan[0]) - 1}


@given(data=st.data(), lengths=lengths_of_a_step, num_ranks=num_ranks_drawn)
def test_the_order_of_the_sequences_does_not_matter(data: st.DataObject, lengths: list[int], num_ranks: int) -> None:
    shuffled = data.draw(st.permutations(rows(lengths)))
    expected = plan_micro_batches(rows(lengths), num_ranks=num_ranks, max_tokens=100)
    assert plan_micro_batches(shuffled, num_ranks=num_ranks, max_tokens=100) == expected


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_ranks_hardly_wait_for_each_other_although_attention_dominates(num_ranks: int) -> None:
    generator = np.random.default_rng(0)
    lengths = [int(length) for length in np.clip(generator.lognormal(8.0, 1.0, size=256), 100, 30_000)]
    plan = plan_micro_batches(rows(lengths), num_ranks=num_ranks, max_tokens=32_000)
    assert step_cost(plan) <= 1.1 * sum(one.cost for one in rows(lengths)) / num_ranks


def test_a_small_step_uses_one_micro_batch_and_every_rank() -> None:
    plan = plan_micro_batches(rows([10] * 8), num_ranks=4, max_tokens=1000)
    assert [[len(ids) for ids in rank] for rank in plan] == [[2], [2], [2], [2]]


def test_ranks_without_a_sequence_get_an_empty_micro_batch() -> None:
    plan = plan_micro_batches(rows([10]), num_ranks=3, max_tokens=1000)
    assert sorted(plan, key=str) == [((),), ((),), ((rows([10])[0],),)]


def test_nothing_to_plan_is_no_micro_batches() -> None:
    assert plan_micro_batches([], num_ranks=2, max_tokens=10) == ((), ())


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="num_ranks = 0"):
        plan_micro_batches([], num_ranks=0, max_tokens=10)
    with pytest.raises(ValueError, match="twice"):
        plan_micro_batches(rows([1]) * 2, num_ranks=1, max_tokens=10)


def group(name: str, *, prompt: int, lengths: list[int]) -> list[SequenceSummary]:
    """Rows that share a prompt."""
    return [summary(f"{name}/g{k}/s0", prompt + n, shared=prompt if k else 0) for k, n in enumerate(lengths)]


def test_on_one_rank_a_group_that_fits_is_not_cut() -> None:
    groups = [group(name, prompt=100, lengths=[10] * 8) for name in "abc"]
    (rank,) = plan_groups(groups, num_ranks=1, max_tokens=500, rule=LayoutRule())
    assert sorted(bundle.row_ids for micro_batch in rank for bundle in micro_batch) == [
        tuple(row.id for row in rows_of_group) for rows_of_group in groups
    ]
    assert all(tokens(micro_batch) <= 500 for micro_batch in rank)


def test_one_large_group_is_cut_so_that_no_rank_idles() -> None:
    large = group("a", prompt=10, lengths=[1000] * 8)
    ranks = plan_groups([large], num_ranks=4, max_tokens=16_384, rule=LayoutRule())
    assert [sum(len(bundle.row_ids) for bundle in micro_batch) for rank in ranks for micro_batch in rank] == [2] * 4


def test_a_group_with_a_large_prompt_is_not_cut_for_the_sake_of_balance() -> None:
    groups = [group(name, prompt=4000, lengths=[10] * 4) for name in "ab"]
    ranks = plan_groups(groups, num_ranks=2, max_tokens=16_384, rule=LayoutRule())
    assert [len(micro_batch) for rank in ranks for micro_batch in rank] == [1, 1]


@given(data=st.data(), num_ranks=num_ranks_drawn, layout=st.sampled_from(["auto", "per_call", "linear", "tree"]))
def test_every_row_of_every_group_is_planned_once_in_any_layout(
    data: st.DataObject, num_ranks: int, layout: str
) -> None:
    shapes = data.draw(st.lists(st.tuples(st.integers(0, 60), st.lists(st.integers(1, 60), max_size=5)), max_size=6))
    groups = [group(f"t{k}", prompt=prompt, lengths=lengths) for k, (prompt, lengths) in enumerate(shapes)]
    plan = plan_groups(groups, num_ranks=num_ranks, max_tokens=100, rule=LayoutRule(layout=layout))
    planned = [row_id for rank in plan for part in rank for bundle in part for row_id in bundle.row_ids]
    assert sorted(planned) == sorted(row.id for rows_of_group in groups for row in rows_of_group)
    for micro_batch in chain.from_iterable(plan):
        assert tokens(micro_batch) <= 100 or sum(len(bundle.row_ids) for bundle in micro_batch) == 1
