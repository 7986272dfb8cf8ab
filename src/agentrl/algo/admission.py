"""How many groups may be sampled at a time, so that little of the work is too old once it is trained. Pure."""

from __future__ import annotations


def groups_to_admit(*, num_outstanding: int, num_free: int, tasks_per_step: int, max_staleness: int) -> int:
    """How many further groups a sampler may start now; never negative.

    `num_outstanding` counts the groups of all samplers that are running, settled or in training: work whose step is not
    committed. At most `max_staleness + 1` steps' worth may be outstanding, so a group that starts now is trained, in
    order, at most `max_staleness` versions later. Only one that is overtaken by others can be older: the planner drops
    it (the bound is hard), and its place becomes free. `num_free` is what the sampler has room for.
    """
    return max(0, min(num_free, (max_staleness + 1) * tasks_per_step - num_outstanding))
