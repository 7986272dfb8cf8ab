"""The MemoryStore's list of who is there, and whose tokens are not trusted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import TypeVar

from agentrl.store.fleet import KEPT_SILENT, SILENT_AFTER
from agentrl.types import EngineQuarantine, InferenceService, Worker

Entry = TypeVar("Entry", InferenceService, Worker)


class MemoryFleet:
    """See FleetStore."""

    def __init__(self, *, clock: Callable[[], datetime]) -> None:
        self._clock = clock
        self._services: dict[str, InferenceService] = {}
        self._workers: dict[str, Worker] = {}
        self._quarantines: dict[str, EngineQuarantine] = {}

    async def server_time(self) -> datetime:
        """See FleetStore.server_time."""
        return self._clock()

    async def put_service(self, service: InferenceService) -> None:
        """See FleetStore.put_service."""
        self._put(self._services, replace(service, heartbeat_at=self._clock()))

    async def list_services(self) -> list[InferenceService]:
        """See FleetStore.list_services."""
        return sorted(self._services.values(), key=lambda service: service.id)

    async def put_worker(self, worker: Worker) -> None:
        """See FleetStore.put_worker."""
        self._put(self._workers, replace(worker, heartbeat_at=self._clock()))

    async def list_workers(self) -> list[Worker]:
        """See FleetStore.list_workers."""
        return sorted(self._workers.values(), key=lambda worker: worker.id)

    async def raise_engine_quarantine(self, quarantine: EngineQuarantine) -> None:
        """See FleetStore.raise_engine_quarantine."""
        self._quarantines.setdefault(quarantine.id, replace(quarantine, raised_at=self._clock()))

    async def lift_engine_quarantine(self, quarantine_id: str, *, until_s: float) -> None:
        """See FleetStore.lift_engine_quarantine."""
        self._quarantines[quarantine_id] = replace(self._quarantines[quarantine_id], until_s=until_s)

    async def list_engine_quarantines(self) -> list[EngineQuarantine]:
        """See FleetStore.list_engine_quarantines."""
        return [self._quarantines[key] for key in sorted(self._quarantines)]

    def _put(self, entries: dict[str, Entry], entry: Entry) -> None:
        is_new = entry.id not in entries
        entries[entry.id] = entry
        if is_new:
            silent = [entry for entry in entries.values() if self._is_silent(entry)]
            for gone in sorted(silent, key=lambda entry: entry.heartbeat_at or self._clock())[:-KEPT_SILENT]:
                del entries[gone.id]

    def _is_silent(self, entry: InferenceService | Worker) -> bool:
        return entry.heartbeat_at is not None and self._clock() - entry.heartbeat_at > SILENT_AFTER
