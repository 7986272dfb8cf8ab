"""Reads how a run is going from the store, cheaply enough to do it every second."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta

from agentrl.config import RunConfig
from agentrl.inspector import RunProgress
from agentrl.protocols import FleetStore, Store
from agentrl.types import InferenceService, StepStatus, TrainStep

TRAIN_SPLIT = "train"


@dataclass(slots=True, kw_only=True)
class ProgressReader:
    """Remembers the committed steps, so that each look asks for new ones only.

    Workers and services whose heartbeat is older than `forget_after` are left out.
    """

    store: Store
    config: RunConfig
    forget_after: timedelta
    _steps: list[TrainStep] = field(default_factory=list)

    async def read(self, *, num_restarts: int = 0) -> RunProgress:
        """One look."""
        while (step := await self.store.get_step(len(self._steps) + 1)) is not None:
            if step.status is not StepStatus.COMMITTED:
                break
            self._steps.append(step)
        now = await self.store.server_time()
        return RunProgress(
            run_name=self.config.run.run_name,
            max_steps=self.config.train.max_steps,
            steps=tuple(self._steps),
            tasks=await self.store.count_tasks(split=TRAIN_SPLIT),
            workers=tuple(
                worker
                for worker in await self.store.list_workers()
                if _is_recent(worker.heartbeat_at, now=now, younger_than=self.forget_after)
            ),
            services=tuple(await recent_services(self.store, younger_than=self.forget_after)),
            num_restarts=num_restarts,
        )


async def recent_services(store: FleetStore, *, younger_than: timedelta) -> list[InferenceService]:
    """The inference services with a fresh heartbeat, by the database server's clock."""
    now = await store.server_time()
    services = await store.list_services()
    return [service for service in services if _is_recent(service.heartbeat_at, now=now, younger_than=younger_than)]


def _is_recent(heartbeat_at: datetime | None, *, now: datetime, younger_than: timedelta) -> bool:
    return heartbeat_at is not None and now - heartbeat_at < younger_than
