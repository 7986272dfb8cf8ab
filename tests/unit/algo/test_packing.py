from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algo.packing import plan_micro_batches, sequence_cost
from agentrl.types import SequenceSummary


def summaries(lengths: list[int]) -> list[SequenceSummary]:
    return [
        SequenceSummary(id=f"r{index:03d}", num_tokens=length, num_trained_tokens=1, min_policy_version=0)
        for index, length in enumerate(lengths)
    ]


def tokens(ids: tuple[str, ...], lengths: list[int]) -> int:
    return sum(lengths[int(one[1:])] for one in ids)


lengths_of_a_step = st.lists(st.integers(1, 130), max_size=40)
num_ranks_drawn = st.integers(1, 5)


@given(lengths=lengths_of_a_step, num_ranks=num_ranks_drawn)
def test_every_sequence_is_planned_exactly_once(lengths: list[int], num_ranks: int) -> None:
    plan = plan_micro_batches(summaries(lengths), num_ranks=num_ranks, max_tokens=100)
    planned = list(chain.from_iterable(chain.from_iterable(plan)))
    assert sorted(planned) == [one.id for one in summaries(lengths)]


@given(lengths=lengths_of_a_step, num_ranks=num_ranks_drawn)
def test_micro_batches_keep_the_budget_and_longer_sequences_sit_alone(lengths: list[int], num_ranks: int) -> None:
    for micro_batch in chain.from_iterable(plan_micro_batches(summaries(lengths), num_ranks=num_ranks, max_tokens=100)):
        assert tokens(micro_batch, lengths) <= 100 or len(micro_batch) == 1


@given(lengths=lengths_of_a_step, num_ranks=num_ranks_drawn)
def test_every_rank_has_equally_many_micro_batches(lengths: list[int], num_ranks: int) -> None:
    plan = plan_micro_batches(summaries(lengths), num_ranks=num_ranks, max_tokens=100)
    assert len(plan) == num_ranks
    assert len({len(rank) for rank in plan}) == 1


@given(lengths=lengths_of_a_step, num_ranks=num_ranks_drawn)
def test_no_more_than_one_row_of_micro_batches_has_empty_ones(lengths: list[int], num_ranks: int) -> None:
    plan = plan_micro_batches(summaries(lengths), num_ranks=num_ranks, max_tokens=100)
    filler = [index for rank in plan for index, micro_batch in enumerate(rank) if not micro_batch]
    assert len(filler) < num_ranks
    assert set(filler) <= {len(plan[0]) - 1}


@given(data=st.data(), lengths=lengths_of_a_step, num_ranks=num_ranks_drawn)
def test_the_order_of_the_sequences_does_not_matter(data: st.DataObject, lengths: list[int], num_ranks: int) -> None:
    shuffled = data.draw(st.permutations(summaries(lengths)))
    expected = plan_micro_batches(summaries(lengths), num_ranks=num_ranks, max_tokens=100)
    assert plan_micro_batches(shuffled, num_ranks=num_ranks, max_tokens=100) == expected


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_ranks_hardly_wait_for_each_other_although_attention_dominates(num_ranks: int) -> None:
    generator = np.random.default_rng(0)
    lengths = [int(length) for length in np.clip(generator.lognormal(8.0, 1.0, size=256), 100, 30_000)]
    plan = plan_micro_batches(summaries(lengths), num_ranks=num_ranks, max_tokens=32_000)
    costs = [[sum(sequence_cost(lengths[int(one[1:])]) for one in part) for part in rank] for rank in plan]
    step_time = sum(max(side_by_side) for side_by_side in zip(*costs, strict=True))
    assert step_time <= 1.1 * sum(sequence_cost(length) for length in lengths) / num_ranks


def test_a_small_step_uses_one_micro_batch_and_every_rank() -> None:
    plan = plan_micro_batches(summaries([10] * 8), num_ranks=4, max_tokens=1000)
    assert [[len(ids) for ids in rank] for rank in plan] == [[2], [2], [2], [2]]


def test_ranks_without_a_sequence_get_an_empty_micro_batch() -> None:
    plan = plan_micro_batches(summaries([10]), num_ranks=3, max_tokens=1000)
    assert sorted(plan) == [((),), ((),), (("r000",),)]


def test_nothing_to_plan_is_no_micro_batches() -> None:
    assert plan_micro_batches([], num_ranks=2, max_tokens=10) == ((), ())


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="num_ranks = 0"):
        plan_micro_batches([], num_ranks=0, max_tokens=10)
    with pytest.raises(ValueError, match="twice"):
        plan_micro_batches(summaries([1]) * 2, num_ranks=1, max_tokens=10)
