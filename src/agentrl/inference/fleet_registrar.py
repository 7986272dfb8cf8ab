"""Decides which runs of a fleet one inference service serves, loads their weights, and tells each run the truth.

    every second      read the fleet: newest weights and demand of each run, services that have them
    same runs,        pause(retract) ─► load ─► continue: running generations go on, as under run_registrar
      newer weights
    other runs        DRAINING: groups that run may end, for fleet_dwell_s at most, none is begun
                      ─► DOWN ─► pause(abort): what still runs is aborted, never continued under foreign weights
                      ─► load ─► continue ─► canaries answered rightly ─► UP for the new runs
    every canary_interval_s   canaries of the runs that are served: none answered ─► DOWN; wrong ─► QUARANTINED

What the engine reports is the weight label, e.g. `run_a=3,run_b=0`: the versions of every run whose weights these are.
A client accepts a token only under a label that names its run, so a mistake here costs time and never data. In a run's
database the service is UP only while it serves that run's newest version and that run's canaries agree.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from agentrl.errors import EngineError, EngineErrorKind, StoreError
from agentrl.fleets import read_weight_label, weight_label
from agentrl.inference.canary import CanarySettings
from agentrl.inference.client import EngineClient, EngineLoad
from agentrl.inference.fleet_canary import FleetCanaries
from agentrl.inference.fleet_view import FleetReader, RunView, plan_for
from agentrl.inference.registrar import UPDATE_TIMEOUT_S
from agentrl.inference.service_loops import BACKOFF_FIRST_S, GOODBYE_TIMEOUT_S, load_of, longer, run_until
from agentrl.pacing import Pace
from agentrl.types import InferenceService, PolicyVersion, ServiceStatus

logger = logging.getLogger(__name__)

REVIEW_S = 1.0
DRAIN_POLL_S = 0.2
AVOID_S = 30.0
_LOADING_IS_NO_USE = {EngineErrorKind.REJECTED, EngineErrorKind.INVALID_SAMPLE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Weights verified to be in the engine, and whose they are."""

    key: str
    path: str
    versions: Mapping[str, int]  # by run
    policies: Mapping[str, PolicyVersion | None] = field(compare=False)  # what the canaries of each run judge by

    @property
    def label(self) -> str:
        """What the engine reports."""
        return weight_label(self.versions)


async def run_fleet_registrar(
    client: EngineClient,
    reader: FleetReader,
    *,
    service_id: str,
    engine: str,
    poll_s: float,
    heartbeat_s: float,
    dwell_s: float,
    canary: CanarySettings,
    stop: asyncio.Event,
) -> None:
    """Serve the fleet until `stop` is set or the task is cancelled; then mark the service DOWN in every run."""
    canaries = FleetCanaries(client=client, service_id=service_id, settings=canary)
    registrar = FleetRegistrar(
        client=client, reader=reader, service_id=service_id, engine=engine, dwell_s=dwell_s, canaries=canaries
    )
    try:
        loops = {
            f"follow {service_id}": registrar.follow(poll_s=poll_s),
            f"heartbeat {service_id}": registrar.beat(heartbeat_s=heartbeat_s),
            f"canary {service_id}": registrar.watch(interval_s=canary.interval_s),
        }
        await run_until(stop, loops=loops)
    finally:
        await registrar.say_goodbye()
        await reader.close()


@dataclass(kw_only=True)
class FleetRegistrar:
    """State of one service of a fleet. `loaded` is None while it is not known what the engine holds."""

    client: EngineClient
    reader: FleetReader
    service_id: str
    engine: str
    dwell_s: float
    canaries: FleetCanaries
    loaded: Loaded | None = None
    views: dict[str, RunView] = field(default_factory=dict)
    is_draining: bool = False
    is_loading: bool = False
    _since: float = float("-inf")  # when the loaded weights came
    _read_at: float = float("-inf")
    _avoided_until: dict[str, float] = field(default_factory=dict)  # by key of weights that could not be loaded
    _announcing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def follow(self, *, poll_s: float) -> None:
        """Keep the service at the weights the plan gives it."""
        backoff_s = BACKOFF_FIRST_S
        pace = Pace(shortest_s=poll_s, longest_s=poll_s)
        while True:
            try:
                if await self._is_due() and await self._review():
                    pace.reset()
                backoff_s, pause_s = BACKOFF_FIRST_S, pace.pause()
            except (EngineError, StoreError) as error:
                logger.warning("service %s (%s): %s", self.service_id, self.client.base_url, error)
                if isinstance(error, EngineError):
                    self.loaded = None
                await self._announce()
                is_quarantined = self.canaries.has_quarantine(self.views)
                pause_s, backoff_s = backoff_s, longer(backoff_s, is_quarantined=is_quarantined)
            await asyncio.sleep(pause_s)

    async def beat(self, *, heartbeat_s: float) -> None:
        """Refresh the service's entries; notice when the engine is gone or has come back with other weights."""
        while True:
            await asyncio.sleep(heartbeat_s)
            await self._check()
            await self._announce()

    async def watch(self, *, interval_s: float) -> None:
        """Ask the canaries of what is served, and take the service down if it hangs, is paused, or answers wrongly."""
        while True:
            await asyncio.sleep(interval_s)
            loaded = self.loaded
            if loaded is None or self.is_loading:
                continue
            try:
                await self.canaries.check(loaded.policies)
            except (EngineError, StoreError) as error:
                if self.is_loading or self.loaded is not loaded:
                    continue  # the weights were being changed meanwhile
                logger.warning("service %s: %s", self.service_id, error)
                if isinstance(error, EngineError) or self.canaries.has_quarantine(loaded.policies):
                    self.loaded = None
                await self._announce()

    async def say_goodbye(self) -> None:
        """Mark the service DOWN everywhere, bounded."""
        self.loaded = None
        try:
            async with asyncio.timeout(GOODBYE_TIMEOUT_S):
                await self._announce()
        except TimeoutError:
            logger.warning("service %s could not be marked DOWN in every run", self.service_id)

    async def _is_due(self) -> bool:
        """Once a second, and at once when a run that is served has published."""
        if self.loaded is None or time.monotonic() - self._read_at >= REVIEW_S:
            return True
        for name in self.loaded.versions.keys() & self.views.keys():
            view = self.views[name]
            policy = await view.store.latest_policy()
            if policy is not None and policy.version != view.version:
                return True
        return False

    async def _review(self) -> bool:
        """Read the fleet, decide, and do it; whether the service serves something else now."""
        await self._read()
        if self.loaded is None:
            await self._recognise()
        before = self.loaded
        usable = {name: view for name, view in self.views.items() if not self._is_avoided(view.key)}
        views = usable or self.views
        target = self._target(self._decide(views), views)
        if target is not None and before is not None and before.key == target.key:
            await self._relabel(target)
        elif target is not None:
            await self._switch(target)
        if self.loaded != before:
            await self._announce()
        return self.loaded != before

    async def _read(self) -> None:
        gone = self.views
        self.views = await self.canaries.take_over(await self.reader.read())
        self._read_at = time.monotonic()
        for name in gone.keys() - self.views.keys():
            await self._put(gone[name], ServiceStatus.DOWN, version=gone[name].version)

    async def _recognise(self) -> None:
        """Learn from the engine what it holds, after a start or a failure."""
        info = await self.client.model_info()
        versions = read_weight_label(info.weight_version)
        if versions is None:
            return
        for view in self.views.values():
            if versions.get(view.name) == view.version and view.path == info.model_path:
                same = [v for v in self.views.values() if v.key == view.key and versions.get(v.name) == v.version]
                policies = {v.name: v.policy for v in same}
                if self.canaries.has_quarantine(policies):
                    return  # the labels are right and the answers are not: load them again
                await self.client.continue_generation()  # whoever loaded it may have died before saying so
                await self.canaries.check(policies)
                self.loaded = Loaded(key=view.key, path=view.path, versions=versions, policies=policies)
                return

    def _is_avoided(self, key: str) -> bool:
        """Whether these weights could not be loaded a moment ago: other runs need not wait for them."""
        return time.monotonic() < self._avoided_until.get(key, float("-inf"))

    def _decide(self, views: Mapping[str, RunView]) -> str | None:
        """Key of the weights to hold now."""
        holding = None if self.loaded is None else self.loaded.key
        if self.loaded is not None and not any(view.key == holding for view in views.values()):
            # Newer weights of a run that is served inherit its place in the plan.
            holding = next((views[name].key for name in sorted(self.loaded.versions) if name in views), None)
        planned = plan_for(self.service_id, views, holding=holding)
        if holding is None or planned == holding:
            return planned
        is_wanted = any(view.key == holding and view.wants for view in views.values())
        return holding if is_wanted and time.monotonic() - self._since < self.dwell_s else planned

    def _target(self, key: str | None, views: Mapping[str, RunView]) -> Loaded | None:
        """All runs with these weights; with no demand at all, whatever comes first, so that a run finds a service."""
        if key is None:
            key = next((view.key for _, view in sorted(views.items())), None)
        of_key = {name: view for name, view in views.items() if view.key == key}
        if key is None or not of_key:
            return None
        first = of_key[min(of_key)]
        return Loaded(
            key=key,
            path=first.path,
            versions={name: view.version for name, view in of_key.items()},
            policies={name: view.policy for name, view in of_key.items()},
        )

    async def _relabel(self, target: Loaded) -> None:
        """Name the runs that join the loaded weights, too. Who published newer ones stays named: it is still true."""
        assert self.loaded is not None
        before = self.loaded
        joined = Loaded(
            key=target.key,
            path=before.path,
            versions={**before.versions, **target.versions},
            policies={**before.policies, **target.policies},
        )
        if joined.versions == before.versions:
            return
        new = joined.versions.items() - before.versions.items()
        self.is_loading = True
        try:
            await self.client.update_weight_version(joined.label)
            await self.canaries.check({name: joined.policies[name] for name, _ in new})
            self.loaded = joined
        finally:
            self.is_loading = False
        logger.info("service %s serves %s", self.service_id, joined.label)

    async def _switch(self, target: Loaded) -> None:
        """Load other weights. Generations go on only if every run that may have some is served afterwards, too."""
        before = self.loaded
        may_continue = before is not None and before.versions.keys() <= target.versions.keys()
        if before is not None and not may_continue:
            await self._drain(leaving=before.versions.keys() - target.versions.keys())
        self.is_loading = True
        try:
            await self._load(target, keeps_running=may_continue)
        except (EngineError, StoreError) as error:
            self.loaded = None
            if isinstance(error, EngineError) and error.kind in _LOADING_IS_NO_USE:
                self._avoided_until[target.key] = time.monotonic() + AVOID_S
            raise
        finally:
            self.is_loading = False
        if not may_continue:
            self._since = time.monotonic()
        logger.info("service %s serves %s", self.service_id, target.label)

    async def _drain(self, *, leaving: Set[str]) -> None:
        """Let the groups end that need this service, for `dwell_s` at most; then nothing is routed here any more."""
        self.is_draining = True
        try:
            await self._announce()
            deadline = time.monotonic() + self.dwell_s
            while not await self._is_drained(leaving):
                if time.monotonic() > deadline:
                    logger.info("service %s does not wait for what still runs of %s", self.service_id, sorted(leaving))
                    break
                await asyncio.sleep(DRAIN_POLL_S)
            self.loaded = None
            await self._announce()
        finally:
            self.is_draining = False

    async def _is_drained(self, leaving: Set[str]) -> bool:
        """Whether the runs that leave have no group in flight that no other service works for."""
        await self._read()
        views = [view for name, view in self.views.items() if name in leaving]
        return not any(view.num_running and not view.is_served_by_another(self.service_id) for view in views)

    async def _load(self, target: Loaded, *, keeps_running: bool) -> None:
        """Load and verify. On failure nothing is assumed about the engine."""
        self.loaded = self.loaded if keeps_running else None
        await self.client.pause(mode="retract" if keeps_running else "abort")
        await self.client.update_weights_from_disk(target.path, version=target.label, timeout_s=UPDATE_TIMEOUT_S)
        info = await self.client.model_info()
        if info.weight_version != target.label:
            message = f"{self.client.base_url} reports {info.weight_version} after loading {target.label}"
            raise EngineError(message, kind=EngineErrorKind.REJECTED)
        await self.client.continue_generation()
        await self.canaries.check(target.policies)
        self.loaded = target

    async def _check(self) -> None:
        """Compare what the engine says with what was loaded."""
        loaded = self.loaded
        if loaded is None or self.is_loading:
            return
        try:
            info = await self.client.model_info()
        except EngineError as error:
            logger.warning("service %s does not answer: %s", self.service_id, error)
            self.loaded = None
            return
        if self.loaded is loaded and not self.is_loading and info.weight_version != loaded.label:
            logger.warning("service %s came back with weights %s", self.service_id, info.weight_version)
            self.loaded = None

    async def _announce(self) -> None:
        """Tell every run what is true for it."""
        async with self._announcing:
            load = None
            if self.loaded is not None:
                load = await load_of(self.client, service_id=self.service_id)
                if load is None:
                    self.loaded = None
            for view in list(self.views.values()):
                version = None if self.loaded is None else self.loaded.versions.get(view.name)
                status = self._status(view, version)
                known = view.version if version is None else version
                await self._put(view, status, version=known, load=load)

    def _status(self, view: RunView, version: int | None) -> ServiceStatus:
        if self.canaries.has_quarantine([view.name]):
            return ServiceStatus.QUARANTINED
        if version is None:
            return ServiceStatus.DOWN
        is_newest = version == view.version and not self.is_draining
        return ServiceStatus.UP if is_newest else ServiceStatus.DRAINING

    async def _put(self, view: RunView, status: ServiceStatus, *, version: int, load: EngineLoad | None = None) -> None:
        canary = self.canaries.by_run[view.name]
        service = InferenceService(
            id=self.service_id,
            base_url=self.client.base_url,
            status=status,
            policy_version=version,
            engine=self.engine,
            num_running=0 if load is None else load.num_running,
            num_waiting=0 if load is None else load.num_waiting,
            canary=canary.answer,
            last_good_s=canary.last_good_s,
        )
        try:
            await view.store.put_service(service)
        except StoreError as error:
            logger.warning("service %s: heartbeat not written to run %s: %s", self.service_id, view.name, error)
