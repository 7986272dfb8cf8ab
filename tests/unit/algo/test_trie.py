from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algo.trie import build_trie, input_tokens, model_calls, summarise_group
from tiny_model import random_row
from trees import branching_rows, group_rows


def arrays(rows: list[list[int]]) -> list[np.ndarray]:
    return [np.array(row, dtype=np.int32) for row in rows]


@given(rows=branching_rows())
def test_the_path_of_a_row_spells_its_tokens_at_their_positions(rows: list[list[int]]) -> None:
    trie = build_trie(arrays(rows))
    for row, path in zip(rows, trie.paths, strict=True):
        assert trie.token_ids_N[path].tolist() == row
        assert trie.depths_N[path].tolist() == list(range(len(row)))


@given(rows=branching_rows())
def test_every_distinct_prefix_is_one_node(rows: list[list[int]]) -> None:
    prefixes = {tuple(row[: end + 1]) for row in rows for end in range(len(row))}
    trie = build_trie(arrays(rows))
    assert trie.num_tokens == len(prefixes)
    nodes = {
        int(path[end]): tuple(row[: end + 1])
        for row, path in zip(rows, trie.paths, strict=True)
        for end in range(len(row))
    }
    assert len(set(nodes.values())) == len(nodes) == len(prefixes)


@given(rows=branching_rows())
def test_segments_are_chains_that_cover_all_nodes_and_reach_all_their_descendants(rows: list[list[int]]) -> None:
    trie = build_trie(arrays(rows))
    covered = [node for segment in trie.segments for node in range(segment.start, segment.end)]
    assert covered == list(range(trie.num_tokens))
    ancestors = {int(node): {int(one) for one in path[: at + 1]} for path in trie.paths for at, node in enumerate(path)}
    for segment in trie.segments:
        length = segment.end - segment.start
        assert trie.depths_N[segment.start : segment.end].tolist() == list(range(segment.depth, segment.depth + length))
        for node in range(segment.start, segment.end):
            below = {one for one, above in ancestors.items() if node in above}
            assert below == set(range(node, segment.reach))


@given(data=st.data(), rows=branching_rows())
def test_the_order_of_the_rows_changes_nothing_but_the_order_of_the_paths(
    data: st.DataObject, rows: list[list[int]]
) -> None:
    order = data.draw(st.permutations(range(len(rows))))
    trie, shuffled = build_trie(arrays(rows)), build_trie(arrays([rows[index] for index in order]))
    assert trie.token_ids_N.tolist() == shuffled.token_ids_N.tolist()
    assert trie.segments == shuffled.segments
    assert [trie.paths[index].tolist() for index in order] == [path.tolist() for path in shuffled.paths]


def test_no_rows_and_empty_rows_have_no_nodes() -> None:
    assert build_trie([]).num_tokens == 0
    trie = build_trie(arrays([[], [5]]))
    assert (trie.num_tokens, [path.size for path in trie.paths]) == (1, [0, 1])


def test_a_prompt_of_a_group_is_one_segment_with_a_child_per_generation() -> None:
    trie = build_trie(arrays([[1, 2, 3, 7, 8], [1, 2, 3, 9], [1, 2, 3, 4, 4]]))
    spans = [(one.start, one.end, one.reach, one.depth) for one in trie.segments]
    assert spans == [(0, 3, 8, 0), (3, 5, 5, 3), (5, 7, 7, 3), (7, 8, 8, 3)]


def test_the_planner_is_told_what_each_row_shares_with_the_one_before_it() -> None:
    rows = group_rows()
    summaries = summarise_group(rows)
    assert [one.num_shared_tokens for one in summaries] == [0, 12, 6, 6]
    assert [one.num_tokens for one in summaries] == [row.token_ids.size for row in rows]


def test_model_calls_and_input_end_at_trained_tokens() -> None:
    row = random_row("r/s0", rng=np.random.default_rng(0), length=20)
    assert model_calls(row) == [(3, 10), (12, 19)]
    assert input_tokens(row).tolist() == row.token_ids[:18].tolist()
    row.loss_mask[:] = False
    assert model_calls(row) == []
    assert input_tokens(row).size == 1
