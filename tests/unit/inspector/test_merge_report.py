from __future__ import annotations

from dataclasses import replace
from io import StringIO

from rich.console import Console

from agentrl.algo.layouts import RowLayout
from agentrl.inspector.merge_report import (
    LayoutTokens,
    group_layout_tokens,
    render_merge_report,
    step_layout_tokens,
)
from agentrl.train.batch import build_pass
from trees import group_rows


def test_tokens_are_those_that_a_pass_feeds() -> None:
    rows = group_rows()
    tokens = group_layout_tokens(rows)
    assert tokens.tree == build_pass(rows, layout=RowLayout.TREE).input_ids_BT.numel()
    assert tokens.linear == sum(build_pass([row]).input_ids_BT.numel() for row in rows)
    assert tokens.trained == build_pass(rows).num_trained_tokens
    calls = [run for row in rows for run in _calls(row.loss_mask.tolist())]
    assert tokens.per_call == sum(end - 1 for end in calls)
    assert tokens.tree < tokens.linear < tokens.per_call


def _calls(mask: list[bool]) -> list[int]:
    """Ends of the runs of trained tokens."""
    return [at + 1 for at, trained in enumerate(mask) if trained and mask[at + 1 : at + 2] != [True]]


def test_groups_share_nothing_with_each_other_and_add_up() -> None:
    first, second = group_rows(seed=1), group_rows(seed=1)
    alone = group_layout_tokens(first)
    others = [replace(row, task_id="train:0:other") for row in second]
    assert step_layout_tokens([*first, *others]) == alone + alone


def test_the_report_has_a_line_per_step_and_says_what_a_tree_saves() -> None:
    one = LayoutTokens(num_groups=1, num_rows=8, trained=800, per_call=4000, linear=2000, tree=500)
    console = Console(width=160, record=True, file=StringIO())
    console.print(render_merge_report({1: one, 2: one}))
    text = console.export_text()
    assert "4.00x" in text
    assert "8.00x" in text
    assert "4,000" in text
    assert "75.0% fewer tokens" in text
    assert "not in the store" not in text
    console.print(render_merge_report({1: LayoutTokens(num_missing=3)}))
    assert "3 rows are not in the store" in console.export_text()
