"""Bundles of rows to ranks and micro-batches: under the token budget, with equal work side by side.

Ranks meet in collectives in every micro-batch, so a step takes the sum over micro-batches of the slowest rank. The
plan therefore packs all bundles into num_ranks x M bins of about equal cost, sorts the bins by cost and deals
neighbours to the ranks: what runs at the same time costs about the same.

    bins by cost      9 9 8 7 | 6 5 4 4        num_ranks = 4, M = 2
    micro-batch 0     rank: 9 9 8 7
    micro-batch 1     rank: 4 4 5 6            heavy first, light last evens out the ranks' totals
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrl.algo.layouts import Bundle, LayoutRule, bundle_groups
from agentrl.types import SequenceSummary

TREE_SHARES = (1.0, 0.5, 0.25)
"""Largest trees to try on several ranks, as shares of a rank's fair part of the step."""

MicroBatchPlan = tuple[tuple[tuple[Bundle, ...], ...], ...]
"""[rank][micro-batch] -> bundles."""


def plan_groups(
    groups: Sequence[Sequence[SequenceSummary]],
    *,
    num_ranks: int,
    max_tokens: int,
    rule: LayoutRule,
) -> MicroBatchPlan:
    """The micro-batches of a step: rows of a group laid out and kept together as far as it pays.

    On several ranks a large tree may cost more in waiting than it saves, so trees cut at several sizes are tried and
    the plan whose step is shortest is taken, the one with the larger trees where they tie.
    """
    whole = bundle_groups(groups, rule=rule, max_tokens=max_tokens)
    fair_cost = sum(bundle.cost for bundle in whole) / num_ranks
    limits = [share * fair_cost for share in TREE_SHARES] if num_ranks > 1 else []
    cut = [bundle_groups(groups, rule=rule, max_tokens=max_tokens, max_cost=limit) for limit in limits]
    plans = [plan_micro_batches(bundles, num_ranks=num_ranks, max_tokens=max_tokens) for bundles in (whole, *cut)]
    return min(plans, key=step_cost)


def step_cost(plan: MicroBatchPlan) -> float:
    """The slowest rank of every micro-batch, added up."""
    costs: list[list[float]] = [[sum(bundle.cost for bundle in micro_batch) for micro_batch in rank] for rank in plan]
    return float(sum(max(side_by_side) for side_by_side in zip(*costs, strict=True)))


def plan_micro_batches(bundles: Sequence[Bundle], *, num_ranks: int, max_tokens: int) -> MicroBatchPlan:
    """Every bundle in exactly one micro-batch of at most `max_tokens` tokens; a longer bundle sits alone.

    Every rank gets the same number of micro-batches. Where bundles run out, some are empty: the rank still takes part
    in the collectives, with a loss of 0. No bundles: no micro-batches. A pure function of the set of bundles; their
    order does not matter. Raises ValueError for a repeated id or a count that is not positive.
    """
    if num_ranks < 1 or max_tokens < 1:
        raise ValueError(f"num_ranks = {num_ranks}, max_tokens = {max_tokens}: both must be at least 1")
    row_ids = [row_id for bundle in bundles for row_id in bundle.row_ids]
    if len(set(row_ids)) != len(row_ids):
        raise ValueError("bundles: a row id occurs twice; it would be trained twice")
    ordered = sorted(bundles, key=lambda bundle: (-bundle.cost, bundle.row_ids))
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
    bundles: list[Bundle] = field(default_factory=list)

    def add(self, bundle: Bundle) -> None:
        self.cost += bundle.cost
        self.num_tokens += bundle.num_tokens
        self.bundles.append(bundle)


def _fewest_bins(ordered: Sequence[Bundle], *, max_tokens: int) -> int:
    """A lower bound: one bin per bundle that sits alone, the rest filled to the brim."""
    num_alone = sum(bundle.num_tokens > max_tokens for bundle in ordered)
    shared_tokens = sum(bundle.num_tokens for bundle in ordered if bundle.num_tokens <= max_tokens)
    shared = math.ceil(shared_tokens / max_tokens)
    return num_alone + (shared if shared or num_alone == len(ordered) else 1)


def _pack(ordered: Sequence[Bundle], *, num_bins: int, max_tokens: int) -> list[_Bin] | None:
    """Dearest first, each into the cheapest bin with room. None: these bins are too few."""
    bins = [_Bin(index) for index in range(num_bins)]
    for bundle in ordered:
        fitting = [one for one in bins if not one.bundles or one.num_tokens + bundle.num_tokens <= max_tokens]
        if not fitting:
            return None
        min(fitting, key=lambda one: (one.cost, one.index)).add(bundle)
    return bins


def _deal(bins: Sequence[_Bin], *, num_ranks: int) -> MicroBatchPlan:
    """Neighbours in cost run side by side; the rank that has done least so far takes the heaviest of them."""
    by_cost = sorted(bins, key=lambda one: (-one.cost, one.index))
    ranks: list[list[tuple[Bundle, ...]]] = [[] for _ in range(num_ranks)]
    totals = [0.0] * num_ranks
    for start in range(0, len(by_cost), num_ranks):
        lightest_first = sorted(range(num_ranks), key=lambda rank: (totals[rank], rank))
        for rank, one in zip(lightest_first, by_cost[start : start + num_ranks], strict=True):
            ranks[rank].append(tuple(one.bundles))
            totals[rank] += one.cost
    return tuple(tuple(rank) for rank in ranks)


def _round_up(count: int, multiple: int) -> int:
    return math.ceil(count / multiple) * multiple
