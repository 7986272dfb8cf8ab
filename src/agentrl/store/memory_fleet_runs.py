"""MemoryFleetRuns: the runs of a fleet inside one process, for tests. Same contract as MongoFleetRuns."""

from __future__ import annotations

from dataclasses import replace

from agentrl.fleets import FleetRun, FleetRunStatus, FleetUsage


class MemoryFleetRuns:
    """agentrl.fleets.FleetRunStore in a dictionary. Methods never suspend, so each is atomic."""

    def __init__(self) -> None:
        self._runs: dict[str, FleetRun] = {}

    async def put_fleet_run(self, run: FleetRun) -> None:
        """See FleetRunStore.put_fleet_run."""
        known = self._runs.get(run.name, FleetRun(name=run.name))
        self._runs[run.name] = replace(run, offset=known.offset, usage=known.usage)

    async def list_fleet_runs(self) -> list[FleetRun]:
        """See FleetRunStore.list_fleet_runs."""
        return [self._runs[name] for name in sorted(self._runs)]

    async def put_fleet_usage(self, run_name: str, *, member: str, usage: FleetUsage) -> None:
        """See FleetRunStore.put_fleet_usage."""
        if (run := self._runs.get(run_name)) is not None:
            self._runs[run_name] = replace(run, usage={**run.usage, member: usage})

    async def raise_fleet_offset(self, run_name: str, *, offset: float) -> None:
        """See FleetRunStore.raise_fleet_offset."""
        run = self._runs.get(run_name)
        if run is not None and (run.offset is None or run.offset < offset):
            self._runs[run_name] = replace(run, offset=offset)

    async def move_fleet_run(
        self, run_name: str, *, source: FleetRunStatus, target: FleetRunStatus, reason: str
    ) -> None:
        """See FleetRunStore.move_fleet_run."""
        run = self._runs.get(run_name)
        if run is not None and run.status is source:
            self._runs[run_name] = replace(run, status=target, reason=reason)

    async def close(self) -> None:
        """Nothing to do."""
