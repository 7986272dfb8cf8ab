"""Which run of a fleet gets the next free place of a sampler: strict priority, then weighted fair shares. Pure.

Weighted fair queueing (Demers, Keshav, Shenker 1989) over virtual times that grow by 1/share per Task: of the runs with
the highest priority, the one whose next Task would end first is chosen. While n of them have work, the Tasks granted to
a run differ from its share by less than n. A run that cannot use its share falls behind by a few Tasks at most
(`lifted`), so it does not take the whole fleet when it comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CREDIT_TASKS = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A run as the schedule sees it."""

    name: str
    share: float
    priority: int
    virtual_time: float
    wants: bool  # it has Tasks to claim, and its trainer keeps up
    is_served: bool  # some inference service has its weights
    is_new: bool = False  # it has no place in the schedule yet


def choose_run(contenders: Sequence[Contender]) -> str | None:
    """The run to claim one Task from; None if none can be."""
    first = _first_class(contenders)
    if not first:
        return None
    return min(first, key=lambda run: (run.virtual_time + 1 / run.share, run.name)).name


def lifted(contenders: Sequence[Contender]) -> dict[str, float]:
    """Virtual times to raise, by run: new runs start now; who cannot use its share keeps CREDIT_TASKS of it.

    A run that could use its share but is not served keeps all of its credit: that is the fleet's doing. Raised is what
    fell behind twice as far, so that idle runs are written now and then only.
    """
    known = [run for run in contenders if not run.is_new]
    first = _first_class(known)
    now = _now(first or known)
    raised = {run.name: max(now, run.virtual_time) for run in contenders if run.is_new}
    if not first:
        return raised
    for run in known:
        waits_for_weights = run.wants and not run.is_served and run.priority >= first[0].priority
        if waits_for_weights or run in first:
            continue
        if run.virtual_time < now - 2 * CREDIT_TASKS / run.share:
            raised[run.name] = now - CREDIT_TASKS / run.share
    return raised


def _now(runs: Sequence[Contender]) -> float:
    """The virtual time at which, weighted by share, nobody is ahead or behind."""
    total = sum(run.share for run in runs)
    return sum(run.share * run.virtual_time for run in runs) / total if runs else 0.0


def _first_class(contenders: Sequence[Contender]) -> list[Contender]:
    """Those of the highest priority that can be granted something."""
    ready = [run for run in contenders if run.wants and run.is_served and not run.is_new]
    top = max((run.priority for run in ready), default=0)
    return [run for run in ready if run.priority == top]
