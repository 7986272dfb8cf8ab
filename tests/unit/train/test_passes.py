from hypothesis import given
from hypothesis import strategies as st

from agentrl.train.passes import MAX_WASTED_TOKENS, forward_passes
from agentrl.types import SequenceSummary


def row_of(name: str, num_tokens: int) -> SequenceSummary:
    return SequenceSummary(id=name, num_tokens=num_tokens, num_trained_tokens=num_tokens // 2, min_policy_version=0)


@given(
    lengths=st.lists(st.integers(2, 400), min_size=1, max_size=60),
    num_ranks=st.integers(1, 4),
    max_tokens=st.integers(16, 2000),
)
def test_every_row_is_in_exactly_one_pass_within_the_budget(
    lengths: list[int], num_ranks: int, max_tokens: int
) -> None:
    rows = [row_of(f"r{k}", length) for k, length in enumerate(lengths)]

    passes = forward_passes([rows], num_ranks=num_ranks, max_tokens=max_tokens)

    assert sorted(row_id for rank in passes for one in rank for row_id in one.row_ids) == sorted(row.id for row in rows)
    assert len(passes) == num_ranks
    assert len({len(rank) for rank in passes}) == 1
    size = {row.id: row.num_tokens for row in rows}
    for ids in (one.row_ids for rank in passes for one in rank if len(one.row_ids) > 1):
        widest = max(size[row_id] for row_id in ids)
        assert widest * len(ids) <= max_tokens
        assert widest * len(ids) - sum(size[row_id] for row_id in ids) <= MAX_WASTED_TOKENS


def test_rows_of_unlike_length_do_not_share_a_pass() -> None:
    rows = [row_of("long", 1000), row_of("a", 10), row_of("b", 11)]

    (rank,) = forward_passes([rows], num_ranks=1, max_tokens=10_000)

    assert [one.row_ids for one in rank] == [("long",), ("b", "a")]
