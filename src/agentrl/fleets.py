"""Runs that share samplers and inference services: a fleet, one `FleetRun` document per run. Pure values.

Times of the schedule are virtual: a run's grows by 1/share with every Task it is granted, so runs with equal virtual
times have had their shares. It is the sum of what every sampler process has charged, each under a name of its own that
it alone writes, and of an offset that only grows: nothing is lost or counted twice when processes write at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol


class FleetRunStatus(StrEnum):
    """Whether the fleet works for a run."""

    ACTIVE = "active"
    PAUSED = "paused"  # nothing new is claimed; what runs is finished
    LEFT = "left"  # what runs is given back to the run's queue
    STOPPED = "stopped"  # a budget is used up: nothing new is claimed; what runs is finished


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetUsage:
    """What one sampler process has done for one run, since it started."""

    num_tasks: int = 0  # Tasks claimed for the first time
    num_tokens: int = 0  # sampled tokens of committed turns
    virtual_time: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRun:
    """One run of a fleet: what the user decides about it, and what it has used. `name` is the name of its database."""

    name: str
    share: float = 1.0  # relative to the other runs of the same priority
    priority: int = 0  # a run with a higher one goes first, always
    budget_tasks: int | None = None
    budget_tokens: int | None = None
    status: FleetRunStatus = FleetRunStatus.ACTIVE
    reason: str = ""  # of the status, for people
    config: Mapping[str, Any] = field(default_factory=dict)  # resolved settings by section, without secrets
    offset: float | None = None  # of its virtual time; None: not scheduled yet
    usage: Mapping[str, FleetUsage] = field(default_factory=dict)  # by sampler process

    @property
    def num_tasks(self) -> int:
        """Tasks the fleet has claimed for it."""
        return sum(usage.num_tasks for usage in self.usage.values())

    @property
    def num_tokens(self) -> int:
        """Tokens the fleet has sampled for it."""
        return sum(usage.num_tokens for usage in self.usage.values())

    @property
    def virtual_time(self) -> float:
        """Its place in the schedule."""
        return (self.offset or 0.0) + sum(usage.virtual_time for usage in self.usage.values())

    @property
    def spent_budget(self) -> str | None:
        """Which budget is used up, as a sentence; None while there is something left."""
        if self.budget_tasks is not None and self.num_tasks >= self.budget_tasks:
            return f"budget_tasks = {self.budget_tasks} is used up"
        if self.budget_tokens is not None and self.num_tokens >= self.budget_tokens:
            return f"budget_tokens = {self.budget_tokens} is used up ({self.num_tokens} sampled)"
        return None


class FleetRunStore(Protocol):
    """The runs of a fleet. Users edit the same documents; each usage entry is written by one process only."""

    async def put_fleet_run(self, run: FleetRun) -> None:
        """Create a run's entry, or update what a user decides about it; usage and offset are left alone."""
        ...

    async def list_fleet_runs(self) -> list[FleetRun]:
        """All runs, by name. An entry with impossible settings comes as paused, with the reason."""
        ...

    async def put_fleet_usage(self, run_name: str, *, member: str, usage: FleetUsage) -> None:
        """What the process `member` (a name without dots) has used in all. Nothing happens if the run is gone."""
        ...

    async def raise_fleet_offset(self, run_name: str, *, offset: float) -> None:
        """Set the run's offset unless it is higher already."""
        ...

    async def move_fleet_run(
        self, run_name: str, *, source: FleetRunStatus, target: FleetRunStatus, reason: str
    ) -> None:
        """Give the run another status; one whose status is not `source` stays as it is."""
        ...

    async def close(self) -> None:
        """Disconnect."""
        ...


def weight_label(versions: Mapping[str, int]) -> str:
    """What an engine reports as its weight version while these runs share its weights: `run_a=3,run_b=0`."""
    return ",".join(f"{name}={version}" for name, version in sorted(versions.items()))


def read_weight_label(label: str) -> dict[str, int] | None:
    """Run -> policy version of a label that `weight_label` made; None for any other text."""
    versions: dict[str, int] = {}
    for item in label.split(","):
        name, _, version = item.partition("=")
        if not (name and version.isascii() and version.isdigit()):
            return None
        versions[name] = int(version)
    return versions
