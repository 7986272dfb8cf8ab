"""What attention needs to know of a token trie, and how it falls into pieces without masks.

    nodes      0 1 2 3 4 5 6 7 8         piece            queries     keys
    segment a  [0, 3)                    a, causal        [0, 3)      [0, 3)
    segment b  [3, 7)  below a           b, causal        [3, 7)      [3, 7)
    segment c  [7, 9)  below a           c, causal        [7, 9)      [7, 9)
                                         below a          [3, 9)      [0, 3)      no mask: all below sees all of a

Nodes lie depth first, so the queries that see all of a segment are one range: a segment costs two pieces, nothing is
gathered and every pair of a node and one that it sees is computed once. Where a sliding window ends inside a segment,
its pieces fall into blocks of queries, and only blocks on the window's edge have a mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Any

import torch
from torch import Tensor

from agentrl.algo.trie import Segment, TokenTrie

MASKED_BLOCK = 512  # queries per piece where scores are masked or capped, so that neither is ever T x T


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Queries [q_start, q_end) against keys [k_start, k_end): causally, all of them, or those inside the window."""

    q_start: int
    q_end: int
    k_start: int
    k_end: int
    is_causal: bool = False
    is_masked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TreePlan:
    """What attention needs to know of a trie of T nodes. `prepared` holds what was derived from it, by window."""

    segments: tuple[Segment, ...]
    depths_T: Tensor  # int64: the position of each node, for RoPE and windows
    reach_T: Tensor  # int32: node t is seen by nodes t .. reach_T[t] - 1
    prepared: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of_trie(cls, trie: TokenTrie) -> TreePlan:
        """The plan of a forward pass over this trie."""
        reach_T = torch.empty(trie.num_tokens, dtype=torch.int32)
        for segment in trie.segments:
            reach_T[segment.start : segment.end] = segment.reach
        return cls(
            segments=trie.segments,
            depths_T=torch.from_numpy(trie.depths_N).to(torch.int64),
            reach_T=reach_T,
        )

    def to(self, device: torch.device) -> TreePlan:
        """The same plan on a device."""
        return TreePlan(segments=self.segments, depths_T=self.depths_T.to(device), reach_T=self.reach_T.to(device))

    def pieces(self, *, window: int | None, block: int | None) -> tuple[Piece, ...]:
        """Every pair of a node and one that it sees, once. Windowed pieces lie on blocks of MASKED_BLOCK queries."""
        key = (window, block)
        if key not in self.prepared:
            self.prepared[key] = tuple(_pieces(self.segments, window=window, block=block))
        pieces: tuple[Piece, ...] = self.prepared[key]
        return pieces


def _pieces(segments: Sequence[Segment], *, window: int | None, block: int | None) -> Iterator[Piece]:
    for index, segment in enumerate(segments):
        if block is None and (window is None or _height(segments, index) <= window):
            yield _causal(segment.start, segment.end)
            if segment.reach > segment.end:
                yield Piece(q_start=segment.end, q_end=segment.reach, k_start=segment.start, k_end=segment.end)
        else:
            yield from _blocked(segments, index, window=window, block=block or MASKED_BLOCK)


def _height(segments: Sequence[Segment], index: int) -> int:
    """Tokens from the start of a segment down to its deepest descendant."""
    below = _with_descendants(segments, index)
    return max(one.depth + one.end - one.start for one in below) - segments[index].depth


def _with_descendants(segments: Sequence[Segment], index: int) -> Iterator[Segment]:
    reach = segments[index].reach
    return takewhile(lambda one: one.start < reach, islice(segments, index, None))


def _blocked(segments: Sequence[Segment], index: int, *, window: int | None, block: int) -> Iterator[Piece]:
    """The keys of one segment against blocks of queries, its own and those of its descendants."""
    segment = segments[index]
    size = block if window is None else min(block, window)
    for one in _with_descendants(segments, index):
        for start in range(one.start, one.end, size):
            end = min(start + size, one.end)
            if one is segment:
                yield _causal(start, end)
            yield from _seen(segment, q_start=start, q_end=end, q_depth=one.depth + start - one.start, window=window)


def _causal(start: int, end: int) -> Piece:
    return Piece(q_start=start, q_end=end, k_start=start, k_end=end, is_causal=True)


def _seen(segment: Segment, *, q_start: int, q_end: int, q_depth: int, window: int | None) -> Iterator[Piece]:
    """What a block of queries sees of the part of a segment that lies before them."""
    k_end = min(segment.end, q_start)
    first, last = segment.start, segment.start
    if window is not None:
        first += max(q_depth - window + 1 - segment.depth, 0)
        last += max(q_depth + (q_end - q_start) - window - segment.depth, 0)
    if first < k_end:
        yield Piece(q_start=q_start, q_end=q_end, k_start=first, k_end=k_end, is_masked=last > first)
