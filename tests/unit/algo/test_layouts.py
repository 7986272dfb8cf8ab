from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algo.layouts import LayoutRule, RowLayout, bundle_groups, num_tree_tokens
from agentrl.algo.trie import build_trie, summarise_group
from agentrl.types import SequenceSummary
from trees import group_rows


def summary(name: str, length: int, *, shared: int = 0) -> SequenceSummary:
    return SequenceSummary(
        id=name, num_tokens=length, num_trained_tokens=1, min_policy_version=0, num_shared_tokens=shared
    )


def group(*, prompt: int, length: int, size: int = 8) -> list[SequenceSummary]:
    return [summary(f"g{k}/s0", prompt + length, shared=prompt if k else 0) for k in range(size)]


SMALL = LayoutRule.of_model("auto", hidden_size=64)


def test_a_shared_prompt_makes_a_tree_and_nothing_in_common_does_not() -> None:
    assert SMALL.choose(group(prompt=1536, length=100)) is RowLayout.TREE
    assert SMALL.choose(group(prompt=0, length=100)) is RowLayout.LINEAR
    assert SMALL.choose([summary("alone", 5000)]) is RowLayout.LINEAR
    assert SMALL.choose([]) is RowLayout.LINEAR


def test_a_few_shared_tokens_do_not_pay_for_their_segments_in_a_small_model() -> None:
    few = group(prompt=3, length=20)
    assert SMALL.choose(few) is RowLayout.LINEAR
    assert LayoutRule.of_model("auto", hidden_size=2048).choose(few) is RowLayout.TREE


@pytest.mark.parametrize("layout", ["per_call", "linear", "tree"])
def test_a_setting_other_than_auto_decides_alone(layout: str) -> None:
    rule = LayoutRule(layout=layout)
    assert {rule.choose(group(prompt=prompt, length=9)) for prompt in (0, 2000)} == {RowLayout(layout)}


@given(
    prompt=st.integers(0, 300), length=st.integers(1, 300), size=st.integers(1, 9), hidden=st.sampled_from([64, 4096])
)
def test_the_chosen_layout_never_costs_more_than_linear(prompt: int, length: int, size: int, hidden: int) -> None:
    rows = group(prompt=prompt, length=length, size=size)
    rule = LayoutRule.of_model("auto", hidden_size=hidden)
    bundles = bundle_groups([rows], rule=rule, max_tokens=10**9)
    assert sum(bundle.cost for bundle in bundles) <= sum(rule.row(row) for row in rows) * (1 + 1e-9)


def test_cutting_a_tree_repeats_what_both_parts_share() -> None:
    rows = group(prompt=100, length=50, size=4)
    bundles = bundle_groups([rows], rule=LayoutRule(layout="tree"), max_tokens=210)
    assert [bundle.row_ids for bundle in bundles] == [("g0/s0", "g1/s0"), ("g2/s0", "g3/s0")]
    assert [bundle.num_tokens for bundle in bundles] == [200, 200]


def test_the_planned_tokens_of_a_tree_are_never_too_few() -> None:
    rows = group_rows(num_generations=6)
    summaries = summarise_group(rows)
    for start in range(6):
        for end in range(start + 1, 7):
            trie = build_trie([row.token_ids for row in rows[start:end]])
            assert num_tree_tokens(summaries[start:end]) >= trie.num_tokens
