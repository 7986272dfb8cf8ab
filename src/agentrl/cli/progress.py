"""Reads how a run is going from the store, cheaply enough to do it every second."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from agentrl.config import RunConfig
from agentrl.inspector import RunProgress
from agentrl.protocols import FleetStore, Store
from agentrl.types import InferenceService, StepStatus, TrainStep, Worker

TRAIN_SPLIT = "train"
READ_COMMANDS = 3  # of a look: the next step, the Tasks, and now and then the fleet
FLEET_AGE_S = 10.0  # how old a listing of processes may be that report every few seconds


@dataclass(slots=True, kw_only=True)
class ProgressReader:
    """Remembers the committed steps, so that each look asks for new ones only, and who takes part for a while.

    Workers and services whose heartbeat is older than `forget_after` are left out. `fleet_age_s`: how long a listing of
    them is used again.
    """

    store: Store
    config: RunConfig
    forget_after: timedelta
    fleet_age_s: float = FLEET_AGE_S
    _steps: list[TrainStep] = field(default_factory=list)
    _workers: tuple[Worker, ...] = ()
    _services: tuple[InferenceService, ...] = ()
    _fleet_read_at: float = float("-inf")  # monotonic seconds

    async def read(self, *, num_restarts: int = 0) -> RunProgress:
        """One look."""
        while (step := await self.store.get_step(len(self._steps) + 1)) is not None:
            if step.status is not StepStatus.COMMITTED:
                break
            self._steps.append(step)
        if time.monotonic() - self._fleet_read_at >= self.fleet_age_s:
            await self._read_fleet()
        return RunProgress(
            run_name=self.config.run.run_name,
            max_steps=self.config.train.max_steps,
            steps=tuple(self._steps),
            tasks=await self.store.count_tasks(split=TRAIN_SPLIT),
            workers=self._workers,
            services=self._services,
            num_restarts=num_restarts,
            sampling_stopped=await self.store.sampling_stop(),
        )

    async def _read_fleet(self) -> None:
        now = await self.store.server_time()
        self._workers = tuple(
            worker
            for worker in await self.store.list_workers()
            if _is_recent(worker.heartbeat_at, now=now, younger_than=self.forget_after)
        )
        self._services = tuple(await recent_services(self.store, younger_than=self.forget_after))
        self._fleet_read_at = time.monotonic()


async def recent_services(store: FleetStore, *, younger_than: timedelta) -> list[InferenceService]:
    """The inference services with a fresh heartbeat, by the database server's clock."""
    now = await store.server_time()
    services = await store.list_services()
    return [service for service in services if _is_recent(service.heartbeat_at, now=now, younger_than=younger_than)]


def _is_recent(heartbeat_at: datetime | None, *, now: datetime, younger_than: timedelta) -> bool:
    return heartbeat_at is not None and now - heartbeat_at < younger_than
