"""What the registrars of a fleet know of its runs: newest weights, demand, and which services have them."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from agentrl.algo.admission import groups_to_admit
from agentrl.algo.placement import WeightSet, plan_services
from agentrl.config import RunConfig
from agentrl.errors import ConfigError, StoreError, UnavailableError
from agentrl.fleets import FleetRun, FleetRunStatus, FleetRunStore
from agentrl.inference.weight_identity import WeightIdentities
from agentrl.protocols import Store
from agentrl.types import InferenceService, PolicyVersion, ServiceStatus, TaskStatus

logger = logging.getLogger(__name__)

_TRAIN_SPLIT = "train"

OpenRunStore = Callable[[str], Awaitable[Store]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """One look at one run."""

    run: FleetRun
    store: Store
    policy: PolicyVersion | None  # the newest; None: the start model, as version 0
    version: int
    path: str
    key: str  # of its newest weights: runs with equal keys can be served together
    num_running: int  # Tasks of all samplers
    wants: bool  # it has work for a service
    services: tuple[InferenceService, ...]  # with a fresh heartbeat

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.run.name

    def is_served_by_another(self, service_id: str) -> bool:
        """Whether a service besides `service_id` is UP for it."""
        return any(s.id != service_id and s.status is ServiceStatus.UP for s in self.services)


class FleetReader:
    """Looks at the runs of a fleet; their stores stay open. Runs that cannot be read are left out, and logged."""

    def __init__(self, fleet: FleetRunStore, *, open_run_store: OpenRunStore, heartbeat_timeout_s: float) -> None:
        self._fleet = fleet
        self._open_run_store = open_run_store
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._stores: dict[str, Store] = {}
        self._identities = WeightIdentities()
        self._troubles: dict[str, str] = {}  # by run, as last logged

    async def close(self) -> None:
        """Disconnect from every run."""
        for store in self._stores.values():
            await store.close()
        self._stores.clear()

    async def read(self) -> dict[str, RunView]:
        """All runs that did not leave, by name. Raises StoreError if the fleet's own documents cannot be read."""
        views = {}
        for run in await self._fleet.list_fleet_runs():
            if run.status is FleetRunStatus.LEFT:
                continue
            try:
                views[run.name] = await self._read_run(run)
            except (StoreError, UnavailableError, ConfigError, ValueError) as error:
                if self._troubles.get(run.name) != str(error):
                    logger.warning("run %s is not served for now: %s", run.name, error)
                self._troubles[run.name] = str(error)
        return views

    async def _read_run(self, run: FleetRun) -> RunView:
        store = self._stores.get(run.name)
        if store is None:
            store = self._stores[run.name] = await self._open_run_store(run.name)
        config = RunConfig.model_validate(run.config)
        policy = await store.latest_policy()
        if policy is None and config.model.model_name_or_path is None:
            raise ConfigError("it has no published policy and no model_name_or_path; give one to `agentrl fleet add`")
        version = 0 if policy is None else policy.version
        path = str(config.model.model_name_or_path) if policy is None else policy.path
        counts = await store.count_tasks(split=_TRAIN_SPLIT)
        num_running, num_pending = counts.get(TaskStatus.RUNNING, 0), counts.get(TaskStatus.PENDING, 0)
        num_claimable = groups_to_admit(
            num_outstanding=num_running + counts.get(TaskStatus.SETTLED, 0),
            num_free=num_pending,
            tasks_per_step=config.algo.tasks_per_step,
            max_staleness=config.algo.max_staleness,
        )
        return RunView(
            run=run,
            store=store,
            policy=policy,
            version=version,
            path=path,
            key=await self._identities.key(path, version=version),
            num_running=num_running,
            wants=num_running > 0 or (num_claimable > 0 and run.status is FleetRunStatus.ACTIVE),
            services=self._fresh(await store.list_services(), now=await store.server_time()),
        )

    def _fresh(self, services: Sequence[InferenceService], *, now: datetime) -> tuple[InferenceService, ...]:
        return tuple(
            service
            for service in services
            if service.heartbeat_at is not None
            and (now - service.heartbeat_at).total_seconds() < self._heartbeat_timeout_s
        )


def plan_for(service_id: str, views: Mapping[str, RunView], *, holding: str | None) -> str | None:
    """Key of the weights the service should hold, as every registrar of the fleet would plan it."""
    held: dict[str, str | None] = {service_id: holding}
    for view in views.values():
        for service in view.services:
            if service.id != service_id and service.status is ServiceStatus.UP:
                held[service.id] = view.key
            else:
                held.setdefault(service.id, None)
    wanted: dict[str, list[RunView]] = {}
    for view in views.values():
        if view.wants:
            wanted.setdefault(view.key, []).append(view)
    sets = [
        WeightSet(
            key=key,
            priority=max(view.run.priority for view in of_key),
            share=sum(view.run.share for view in of_key),
            virtual_time=min(view.run.virtual_time for view in of_key),
        )
        for key, of_key in wanted.items()
    ]
    return plan_services(sets, holding=held)[service_id]
