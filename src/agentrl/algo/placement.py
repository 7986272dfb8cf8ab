"""Which weights each inference service of a fleet should hold. Pure: equal facts give every service the same plan.

Every set of weights that is wanted gets a service before any gets a second one, in the order of priority, then of who
is furthest behind its share; further services go by share (highest averages). With fewer services than sets the last
ones wait: they fall behind, and so come first later. A service that holds weights with a place in the plan keeps them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSet:
    """Weights that one or more runs want to be sampled from."""

    key: str
    priority: int  # the highest of its runs
    share: float  # the sum of its runs'
    virtual_time: float  # of the run that is furthest behind


def plan_services(wanted: Sequence[WeightSet], *, holding: Mapping[str, str | None]) -> dict[str, str | None]:
    """Service id -> key of the weights it should hold, given the key each one holds now (None: nothing usable).

    Without anything wanted, everything stays.
    """
    if not wanted:
        return dict(holding)
    seats = _seats(wanted, num_services=len(holding))
    plan: dict[str, str | None] = {}
    for service, key in sorted(holding.items()):
        if key is not None and seats[key] > 0:
            seats[key] -= 1
            plan[service] = key
    free = (service for service in sorted(holding) if service not in plan)
    open_seats = [weights.key for weights in _in_order(wanted) for _ in range(seats[weights.key])]
    return plan | dict(zip(free, open_seats, strict=True))


def _seats(wanted: Sequence[WeightSet], *, num_services: int) -> Counter[str]:
    """How many services each set gets; as many as there are in all."""
    first = _in_order(wanted)[:num_services]
    seats = Counter({weights.key: 1 for weights in first})
    for _ in range(num_services - len(first)):
        best = max(first, key=lambda weights: (weights.share / (seats[weights.key] + 1), weights.key))
        seats[best.key] += 1
    return seats


def _in_order(wanted: Sequence[WeightSet]) -> list[WeightSet]:
    return sorted(wanted, key=lambda weights: (-weights.priority, weights.virtual_time, weights.key))
