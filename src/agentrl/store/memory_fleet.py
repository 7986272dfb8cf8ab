"""The MemoryStore's list of who is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime

from agentrl.types import InferenceService, Worker


class MemoryFleet:
    """See FleetStore."""

    def __init__(self, *, clock: Callable[[], datetime]) -> None:
        self._clock = clock
        self._services: dict[str, InferenceService] = {}
        self._workers: dict[str, Worker] = {}

    async def server_time(self) -> datetime:
        """See FleetStore.server_time."""
        return self._clock()

    async def put_service(self, service: InferenceService) -> None:
        """See FleetStore.put_service."""
        self._services[service.id] = replace(service, heartbeat_at=self._clock())

    async def list_services(self) -> list[InferenceService]:
        """See FleetStore.list_services."""
        return sorted(self._services.values(), key=lambda service: service.id)

    async def put_worker(self, worker: Worker) -> None:
        """See FleetStore.put_worker."""
        self._workers[worker.id] = replace(worker, heartbeat_at=self._clock())

    async def list_workers(self) -> list[Worker]:
        """See FleetStore.list_workers."""
        return sorted(self._workers.values(), key=lambda worker: worker.id)
