"""Splits the rows of a step over ranks and forward passes, by id and length: rows of like length share a pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentrl.algo.layouts import DEFAULT_RULE, Bundle, LayoutRule, RowLayout
from agentrl.algo.packing import plan_groups
from agentrl.types import SequenceSummary

MAX_WASTED_TOKENS = 256  # padding worth another forward pass: about what a pass costs over its tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPass:
    """The rows of one forward pass, none where a rank only takes part in the collectives."""

    layout: RowLayout = RowLayout.LINEAR
    row_ids: tuple[str, ...] = ()


Passes = tuple[tuple[PlannedPass, ...], ...]
"""[rank][forward pass]; every rank has equally many passes, some may be empty."""


def forward_passes(
    groups: Sequence[Sequence[SequenceSummary]],
    *,
    num_ranks: int,
    max_tokens: int,
    rule: LayoutRule = DEFAULT_RULE,
) -> Passes:
    """Split a step over ranks and forward passes; every row lands in exactly one pass.

    A micro-batch of `plan_groups` (at most `max_tokens` real tokens) becomes one pass with all its trees, and passes of
    rows of like length, each with at most `max_tokens` padded tokens (or one row) and at most MAX_WASTED_TOKENS of
    padding. Ranks with fewer passes get empty ones, because collectives must line up.
    """
    lengths = {sequence.id: sequence.num_tokens for group in groups for sequence in group}
    plan = plan_groups(groups, num_ranks=num_ranks, max_tokens=max_tokens, rule=rule)
    ranks = [
        [one for bundles in rank for one in _passes(bundles, lengths=lengths, max_tokens=max_tokens)] for rank in plan
    ]
    num_passes = max((len(rank) for rank in ranks), default=0)
    return tuple(tuple(rank + [PlannedPass()] * (num_passes - len(rank))) for rank in ranks)


def _passes(bundles: Sequence[Bundle], *, lengths: Mapping[str, int], max_tokens: int) -> list[PlannedPass]:
    """The passes of one micro-batch, the tree first."""
    ids = {
        layout: tuple(row_id for bundle in bundles if bundle.layout is layout for row_id in bundle.row_ids)
        for layout in RowLayout
    }
    return [
        *[PlannedPass(layout=RowLayout.TREE, row_ids=ids[RowLayout.TREE]) for _ in ids[RowLayout.TREE][:1]],
        *[
            PlannedPass(layout=RowLayout.LINEAR, row_ids=part)
            for part in _like_lengths(ids[RowLayout.LINEAR], lengths=lengths, max_tokens=max_tokens)
        ],
        *[PlannedPass(layout=RowLayout.PER_CALL, row_ids=(row_id,)) for row_id in ids[RowLayout.PER_CALL]],
    ]


def _like_lengths(ids: Sequence[str], *, lengths: Mapping[str, int], max_tokens: int) -> list[tuple[str, ...]]:
    parts: list[tuple[str, ...]] = []
    part: list[str] = []
    width = wasted = 0
    for row_id in sorted(ids, key=lambda row_id: (-lengths[row_id], row_id)):
        gap = width - lengths[row_id]
        if part and (wasted + gap > MAX_WASTED_TOKENS or width * (len(part) + 1) > max_tokens):
            parts.append(tuple(part))
            part = []
        if not part:
            width, wasted, gap = lengths[row_id], 0, 0
        part.append(row_id)
        wasted += gap
    return [*parts, tuple(part)] if part else parts
