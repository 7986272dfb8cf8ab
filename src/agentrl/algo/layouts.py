"""How the rows of a group are laid out for the forward pass, and what that rule. Loss and gradient do not depend on it.

    per_call   P A0                      one sequence per model call, context repeated: what a request log looks like
               P A0 T1 A1
               P A0 T1 A1 T2 A2
    linear     P A0 T1 A1 T2 A2          one sequence per branch, every call trained where it was sampled
    tree       P ┬ A0 T1 A1 T2 A2        one token trie for the group: what branches and generations share, once
                 └ B0 T1 B1

`auto` takes linear or tree per group, whichever costs less; per_call never costs less than linear. Costs count in
tokens: the time of everything that is linear in the number of tokens, per token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from agentrl.types import SequenceSummary

SequenceLayout = Literal["auto", "per_call", "linear", "tree"]

QUADRATIC_LENGTH_PER_HIDDEN_UNIT = 10.0
"""Attention over T tokens costs as much as all else at T = 10 x hidden size: measured, see docs/benchmarks.md."""

SEGMENT_TOKENS_TIMES_HIDDEN_SQUARED = 60_000.0
"""What one more segment costs in tokens, times hidden size squared (the work of a token): measured likewise."""

LARGE_HIDDEN_SIZE = 2048


class RowLayout(StrEnum):
    """What `sequence_layout` becomes for the rows of one group."""

    PER_CALL = "per_call"
    LINEAR = "linear"
    TREE = "tree"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Rows that stay together in a micro-batch: one row, or the rows of a tree."""

    row_ids: tuple[str, ...]
    num_tokens: int  # of the forward pass, padding aside
    cost: float
    layout: RowLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRule:
    """The setting and the cost model of one policy model. The default is a large model, where segments are free."""

    layout: SequenceLayout = "auto"
    quadratic_length: float = QUADRATIC_LENGTH_PER_HIDDEN_UNIT * LARGE_HIDDEN_SIZE
    segment_tokens: float = 0.0

    @classmethod
    def of_model(cls, layout: SequenceLayout, *, hidden_size: int) -> LayoutRule:
        """Constants for a decoder of this width."""
        return cls(
            layout=layout,
            quadratic_length=QUADRATIC_LENGTH_PER_HIDDEN_UNIT * hidden_size,
            segment_tokens=SEGMENT_TOKENS_TIMES_HIDDEN_SQUARED / hidden_size**2,
        )

    def choose(self, group: Sequence[SequenceSummary]) -> RowLayout:
        """The layout of a group; a setting other than `auto` decides alone."""
        if self.layout != "auto":
            return RowLayout(self.layout)
        linear = sum(self.row(summary) for summary in group)
        return RowLayout.TREE if self.tree(group) < linear else RowLayout.LINEAR

    def row(self, summary: SequenceSummary, *, num_shared: int = 0) -> float:
        """Forward and backward of the tokens behind the first `num_shared`, attending to all before them."""
        return self._prefix(summary.num_tokens) - self._prefix(num_shared)

    def _prefix(self, num_tokens: int) -> float:
        return num_tokens * (1.0 + num_tokens / self.quadratic_length)

    def tree(self, group: Sequence[SequenceSummary]) -> float:
        """A trie of rows in their order. A row that branches off adds its own segment and cuts the one it leaves."""
        total = 0.0
        for index, summary in enumerate(group):
            num_shared = 0 if index == 0 else summary.num_shared_tokens
            num_segments = 2 if num_shared else 1
            total += self.row(summary, num_shared=num_shared) + num_segments * self.segment_tokens
        return total


DEFAULT_RULE = LayoutRule()


def bundle_groups(
    groups: Sequence[Sequence[SequenceSummary]],
    *,
    rule: LayoutRule,
    max_tokens: int,
    max_cost: float = math.inf,
) -> list[Bundle]:
    """What has to stay together in a micro-batch: single rows, or the rows of a tree.

    A tree of more than `max_tokens` tokens or `max_cost` is cut between rows; both parts then hold what they share.
    """
    bundles = []
    for group in groups:
        chosen = rule.choose(group)
        if chosen is RowLayout.TREE:
            bundles.extend(_cut_tree(group, rule=rule, max_tokens=max_tokens, max_cost=max_cost))
        else:
            bundles.extend(_single_row(summary, layout=chosen, rule=rule) for summary in group)
    return bundles


def _single_row(summary: SequenceSummary, *, layout: RowLayout, rule: LayoutRule) -> Bundle:
    return Bundle(row_ids=(summary.id,), num_tokens=summary.num_tokens, cost=rule.row(summary), layout=layout)


def _cut_tree(group: Sequence[SequenceSummary], *, rule: LayoutRule, max_tokens: int, max_cost: float) -> list[Bundle]:
    parts: list[list[SequenceSummary]] = []
    for summary in group:
        grown = [*parts[-1], summary] if parts else [summary]
        if len(grown) == 1 or num_tree_tokens(grown) > max_tokens or rule.tree(grown) > max_cost:
            parts.append([summary])
        else:
            parts[-1] = grown
    return [
        Bundle(
            row_ids=tuple(summary.id for summary in part),
            num_tokens=num_tree_tokens(part),
            cost=rule.tree(part),
            layout=RowLayout.TREE,
        )
        for part in parts
    ]


def num_tree_tokens(group: Sequence[SequenceSummary]) -> int:
    """Nodes of the trie, from above: a row may share more with an earlier row than with the one before it."""
    total = sum(summary.num_tokens - summary.num_shared_tokens for summary in group)
    return total + (group[0].num_shared_tokens if group else 0)
