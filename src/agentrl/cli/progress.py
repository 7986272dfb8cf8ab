"""Reads how a run is going from the store, cheaply enough to do it every second."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta

from agentrl.config import RunConfig
from agentrl.inspector import RunProgress
from agentrl.protocols import Store
from agentrl.types import StepStatus, TrainStep

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
            workers=tuple(w for w in await self.store.list_workers() if self._is_recent(w.heartbeat_at, now=now)),
            services=tuple(s for s in await self.store.list_services() if self._is_recent(s.heartbeat_at, now=now)),
            num_restarts=num_restarts,
        )

    def _is_recent(self, heartbeat_at: datetime | None, *, now: datetime) -> bool:
        return heartbeat_at is not None and now - heartbeat_at < self.forget_after
