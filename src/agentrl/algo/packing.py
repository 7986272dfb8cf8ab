"""Sequences to ranks and micro-batches: under the token budget, with equal work side by side.

Ranks meet in collectives in every micro-batch, so a step takes the sum over micro-batches of the slowest rank. The
plan therefore packs all sequences into num_ranks x M bins of about equal cost, sorts the bins by cost and deals
neighbours to the ranks: what runs at the same time costs about the same.

    bins by cost      9 9 8 7 | 6 5 4 4        num_ranks = 4, M = 2
    micro-batch 0     rank: 9 9 8 7
    micro-batch 1     rank: 4 4 5 6            heavy first, light last evens out the ranks' totals
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrl.types import SequenceSummary

QUADRATIC_LENGTH = 16_384
"""Length at which attention costs as much as everything linear in the length: about 8 x a hidden size of 2048."""

MicroBatchPlan = tuple[tuple[tuple[str, ...], ...], ...]
"""[rank][micro-batch] -> sequence ids."""


def sequence_cost(num_tokens: int) -> float:
    """Relative time of forward and backward: a linear and a quadratic (attention) part."""
    return num_tokens * (1.0 + num_tokens / QUADRATIC_LENGTH)


def plan_micro_batches(sequences: Sequence[SequenceSummary], *, num_ranks: int, max_tokens: int) -> MicroBatchPlan:
    """Every sequence in exactly one micro-batch of at most `max_tokens` tokens; a longer sequence sits alone.

    Every rank gets the same number of micro-batches. Where sequences run out, some are empty: the rank still takes part
    in the collectives, with a loss of 0. No sequences: no micro-batches. A pure function of the set of sequences; their
    order does not matter. Raises ValueError for a repeated id or a count that is not positive.
    """
    if num_ranks < 1 or max_tokens < 1:
        raise ValueError(f"num_ranks = {num_ranks}, max_tokens = {max_tokens}: both must be at least 1")
    if len({sequence.id for sequence in sequences}) != len(sequences):
        raise ValueError("sequences: an id occurs twice; it would be trained twice")
    ordered = sorted(sequences, key=lambda sequence: (-sequence.num_tokens, sequence.id))
    num_bins = _round_up(_fewest_bins(ordered, max_tokens=max_tokens), num_ranks)
    bins = _pack(ordered, num_bins=num_bins, max_tokens=max_tokens)
    while bins is None:
        num_bins += num_ranks
        bins = _pack(ordered, num_bins=num_bins, max_tokens=max_tokens)
    return _deal(bins, num_ranks=num_ranks)


@dataclass(slots=True)
class _Bin:
    index: int
    cost: float = 0.0
    num_tokens: int = 0
    ids: list[str] = field(default_factory=list)

    def add(self, sequence: SequenceSummary) -> None:
        self.cost += sequence_cost(sequence.num_tokens)
        self.num_tokens += sequence.num_tokens
        self.ids.append(sequence.id)


def _fewest_bins(ordered: Sequence[SequenceSummary], *, max_tokens: int) -> int:
    """A lower bound: one bin per sequence that sits alone, the rest filled to the brim."""
    num_alone = sum(sequence.num_tokens > max_tokens for sequence in ordered)
    shared_tokens = sum(sequence.num_tokens for sequence in ordered if sequence.num_tokens <= max_tokens)
    shared = math.ceil(shared_tokens / max_tokens)
    return num_alone + (shared if shared or num_alone == len(ordered) else 1)


def _pack(ordered: Sequence[SequenceSummary], *, num_bins: int, max_tokens: int) -> list[_Bin] | None:
    """Longest first, each into the cheapest bin with room. None: these bins are too few."""
    bins = [_Bin(index) for index in range(num_bins)]
    for sequence in ordered:
        fitting = [one for one in bins if not one.ids or one.num_tokens + sequence.num_tokens <= max_tokens]
        if not fitting:
            return None
        min(fitting, key=lambda one: (one.cost, one.index)).add(sequence)
    return bins


def _deal(bins: Sequence[_Bin], *, num_ranks: int) -> MicroBatchPlan:
    """Neighbours in cost run side by side; the rank that has done least so far takes the heaviest of them."""
    by_cost = sorted(bins, key=lambda one: (-one.cost, one.index))
    ranks: list[list[tuple[str, ...]]] = [[] for _ in range(num_ranks)]
    totals = [0.0] * num_ranks
    for start in range(0, len(by_cost), num_ranks):
        lightest_first = sorted(range(num_ranks), key=lambda rank: (totals[rank], rank))
        for rank, one in zip(lightest_first, by_cost[start : start + num_ranks], strict=True):
            ranks[rank].append(tuple(one.ids))
            totals[rank] += one.cost
    return tuple(tuple(rank) for rank in ranks)


def _round_up(count: int, multiple: int) -> int:
    return math.ceil(count / multiple) * multiple
