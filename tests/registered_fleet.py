"""A fleet of runs with stores in memory, and its registrar beside an engine under test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import tiny_lm
from agentrl.fleets import FleetRun
from agentrl.inference import EngineClient, RoutedClient
from agentrl.inference.canary import CanarySettings
from agentrl.inference.fleet_registrar import run_fleet_registrar
from agentrl.inference.fleet_view import FleetReader
from agentrl.store import MemoryFleetRuns, MemoryStore
from agentrl.types import CanaryReference, InferenceService, PolicyVersion
from factories import make_task

WAIT_S = 20.0
DWELL_S = 0.4
PATIENT_CANARIES = CanarySettings()


class Fleet:
    """Two runs with Tasks waiting, whose weights are `model_dirs[0]` and `[1]` of the engine, and their clients."""

    def __init__(
        self, paths: dict[str, Path], *, version: int = 3, references: Mapping[str, CanaryReference] | None = None
    ) -> None:
        self.runs = MemoryFleetRuns()
        self.paths = paths
        self.version = version
        self.references = references or {}
        self.stores = {name: MemoryStore() for name in paths}
        self.routers = {
            name: RoutedClient(store, run_name=name, vocab_size=tiny_lm.VOCAB_SIZE, refresh_s=0.05)
            for name, store in self.stores.items()
        }

    async def prepare(self) -> None:
        """Documents, pending Tasks, published weights: both runs call theirs version 3."""
        for name, store in self.stores.items():
            config = {"algo": {"tasks_per_step": 4}}
            await self.runs.put_fleet_run(FleetRun(name=name, config=config))
            await store.insert_tasks([make_task(f"q{number}") for number in range(4)])
            await store.publish_policy(
                PolicyVersion(version=self.version, path=str(self.paths[name]), canary=self.references.get(name))
            )

    async def open_run_store(self, name: str) -> MemoryStore:
        return self.stores[name]

    async def charge(self, name: str, virtual_time: float) -> None:
        """Put a run ahead of its share."""
        await self.runs.raise_fleet_offset(name, offset=virtual_time)

    async def service_when(
        self, name: str, is_right: Callable[[InferenceService], bool], *, service_id: str = "s"
    ) -> None:
        async with asyncio.timeout(WAIT_S):
            while not any(is_right(s) for s in await self.stores[name].list_services() if s.id == service_id):
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        for router in self.routers.values():
            await router.close()


@asynccontextmanager
async def registered(
    fleet: Fleet,
    base_url: str,
    *,
    service_id: str = "s",
    dwell_s: float = DWELL_S,
    canary: CanarySettings = PATIENT_CANARIES,
) -> AsyncIterator[None]:
    stop = asyncio.Event()
    async with EngineClient(base_url, timeout_s=5.0) as client:
        reader = FleetReader(fleet.runs, open_run_store=fleet.open_run_store, heartbeat_timeout_s=2.0)
        registrar = asyncio.create_task(
            run_fleet_registrar(
                client, reader, service_id=service_id, engine="embedded", poll_s=0.02, heartbeat_s=0.1, dwell_s=dwell_s,
                canary=canary, stop=stop,
            )
        )  # fmt: skip
        try:
            yield
        finally:
            stop.set()
            async with asyncio.timeout(WAIT_S):
                await registrar
