"""Keeps one inference service at the newest policy version and tells the fleet about it. Embedded or SGLang alike.

    fleet.latest_policy() = v  ->  pause(retract)  ->  update_weights_from_disk(v, flush)  ->  /model_info says v?
                               ->  continue  ->  canaries answered, and rightly?  ->  put_service(UP, v)

Running generations are not lost: they are retracted, and go on under the new weights, which their version spans say. A
service is UP only while it serves the newest version. Whatever fails makes it DOWN and is tried again with back-off;
it is never assumed to have worked. A service that restarted with other weights is noticed at the next heartbeat, one
that hangs or was left paused at the next canary. Wrong canaries make it QUARANTINED until a reload helps (canary.py).
"""

from __future__ import annotations

import asyncio
import logging

from agentrl.errors import EngineError, EngineErrorKind, StoreError
from agentrl.inference.canary import CanarySettings, ServiceCanary
from agentrl.inference.client import EngineClient, ModelInfo
from agentrl.inference.service_loops import BACKOFF_FIRST_S, GOODBYE_TIMEOUT_S, load_of, longer, run_until
from agentrl.pacing import Pace
from agentrl.protocols import FleetStore
from agentrl.types import InferenceService, PolicyVersion, ServiceStatus

logger = logging.getLogger(__name__)

UPDATE_TIMEOUT_S = 600.0
_PARTIAL_UPDATE = "Weights were updated"  # SGLang: changed, though the call failed


async def run_registrar(
    client: EngineClient,
    fleet: FleetStore,
    *,
    service_id: str,
    engine: str,
    poll_s: float,
    heartbeat_s: float,
    canary: CanarySettings,
    stop: asyncio.Event,
    num_registrars: int = 1,
) -> None:
    """Follow the policy until `stop` is set or the task is cancelled; then mark the service DOWN.

    `num_registrars` of one process share its one look a second.
    """
    checks = ServiceCanary(client, fleet, service_id=service_id, settings=canary)
    registrar = _Registrar(client, fleet, service_id=service_id, engine=engine, canary=checks)
    try:
        loops = {
            f"follow {service_id}": registrar.follow(poll_s=poll_s, num_registrars=num_registrars),
            f"heartbeat {service_id}": registrar.beat(heartbeat_s=heartbeat_s),
            f"canary {service_id}": registrar.watch(interval_s=canary.interval_s),
        }
        await run_until(stop, loops=loops)
    finally:
        await registrar.say_goodbye()


class _Registrar:
    """State of one service: `_served` is the version verified to be loaded, None while that is not known."""

    def __init__(
        self, client: EngineClient, fleet: FleetStore, *, service_id: str, engine: str, canary: ServiceCanary
    ) -> None:
        self._canary = canary
        self._is_restored = False
        self._client = client
        self._fleet = fleet
        self._service_id = service_id
        self._engine = engine
        self._served: int | None = None
        self._policy: PolicyVersion | None = None  # what `_served` was loaded from; None: the start model
        self._last_version = 0
        self._announce_lock = asyncio.Lock()
        self._load_lock = asyncio.Lock()

    async def follow(self, *, poll_s: float, num_registrars: int) -> None:
        """Load every new version as soon as it is published."""
        backoff_s = BACKOFF_FIRST_S
        pace = Pace(shortest_s=poll_s, longest_s=poll_s)
        while True:
            try:
                await self._restore()
                policy = await self._fleet.latest_policy()
                if self._served is None or (policy is not None and policy.version != self._served):
                    async with self._load_lock:
                        await self._bring_up(policy)
                    await self._announce()
                    pace.reset()
                backoff_s, pause_s = BACKOFF_FIRST_S, pace.pause(num_commands=num_registrars)
            except (EngineError, StoreError) as error:
                logger.warning("service %s (%s): %s", self._service_id, self._client.base_url, error)
                if isinstance(error, EngineError):
                    self._served = None
                await self._announce_quietly()
                pause_s, backoff_s = backoff_s, longer(backoff_s, is_quarantined=self._canary.is_quarantined)
            await asyncio.sleep(pause_s)

    async def beat(self, *, heartbeat_s: float) -> None:
        """Refresh the service's entry with its load; notice when it is gone or has come back with other weights."""
        while True:
            await asyncio.sleep(heartbeat_s)
            if not self._load_lock.locked():
                await self._check()
            await self._announce_quietly()

    async def watch(self, *, interval_s: float) -> None:
        """Ask the canaries of what is served, and take the service down if it hangs, is paused, or answers wrongly."""
        while True:
            await asyncio.sleep(interval_s)
            served = self._served
            if served is None or self._load_lock.locked():
                continue
            try:
                await self._canary.check(self._policy)
            except (EngineError, StoreError) as error:
                if self._load_lock.locked() or self._served != served:
                    continue  # the weights were being changed meanwhile
                logger.warning("service %s: %s", self._service_id, error)
                if isinstance(error, EngineError) or self._canary.is_quarantined:
                    self._served = None
                await self._announce_quietly()

    async def say_goodbye(self) -> None:
        """Mark the service DOWN, bounded."""
        self._served = None
        try:
            async with asyncio.timeout(GOODBYE_TIMEOUT_S):
                await self._announce()
        except (StoreError, TimeoutError) as error:
            logger.warning("service %s could not be marked DOWN: %s", self._service_id, error)

    async def _bring_up(self, policy: PolicyVersion | None) -> None:
        """Make the service serve `policy` (None: the model it was started with, as version 0), verified.

        Until it fails, the service stays UP: its generations are only held for the moment the weights change.
        """
        info = await self._client.model_info()
        if policy is None:
            await self._adopt_initial(info)
        if policy is not None and (info.weight_version, info.model_path) != (str(policy.version), policy.path):
            await self._update(policy, before=info)
        elif self._canary.is_quarantined:  # the labels are right and the answers are not: load them again
            await self._update(policy or PolicyVersion(version=0, path=info.model_path), before=info)
        # Also when nothing was loaded: a registrar that died between pause and continue left the service paused.
        await self._client.continue_generation()
        await self._canary.check(policy)
        self._policy = policy
        self._served = self._last_version = 0 if policy is None else policy.version
        logger.info("service %s serves policy version %d", self._service_id, self._served)

    async def _restore(self) -> None:
        if not self._is_restored:
            await self._canary.restore()
            self._is_restored = True

    async def _adopt_initial(self, info: ModelInfo) -> None:
        if info.weight_version.isdigit() and info.weight_version != "0":
            message = (
                f"{self._client.base_url} holds version {info.weight_version}, but no policy is published here yet"
            )
            raise EngineError(message, kind=EngineErrorKind.REJECTED)
        if info.weight_version != "0":
            await self._client.update_weight_version("0")

    async def _update(self, policy: PolicyVersion, *, before: ModelInfo) -> None:
        """Load new weights into the paused service. On failure it goes on only if the old weights are surely intact."""
        await self._client.pause(mode="retract")
        try:
            await self._client.update_weights_from_disk(
                policy.path, version=str(policy.version), timeout_s=UPDATE_TIMEOUT_S
            )
        except EngineError as error:
            after = await self._client.model_info()
            if after == before and _PARTIAL_UPDATE not in str(error):
                await self._client.continue_generation()
            raise
        after = await self._client.model_info()
        if after.weight_version != str(policy.version):
            message = f"{self._client.base_url} reports {after.weight_version} after loading {policy.version}"
            raise EngineError(message, kind=EngineErrorKind.REJECTED)

    async def _check(self) -> None:
        """Compare what the service says with what was loaded."""
        if self._served is None:
            return
        try:
            info = await self._client.model_info()
        except EngineError as error:
            logger.warning("service %s does not answer: %s", self._service_id, error)
            self._served = None
            return
        same_path = self._policy is None or info.model_path == self._policy.path
        if not self._load_lock.locked() and not (info.weight_version == str(self._served) and same_path):
            logger.warning("service %s came back with weights %s", self._service_id, info.weight_version)
            self._served = None

    async def _announce_quietly(self) -> None:
        try:
            await self._announce()
        except StoreError as error:
            logger.warning("service %s: heartbeat not written: %s", self._service_id, error)

    async def _announce(self) -> None:
        """Write what is known now: UP with the verified version, or DOWN."""
        async with self._announce_lock:
            load = None
            if self._served is not None:
                load = await load_of(self._client, service_id=self._service_id)
                if load is None:
                    self._served = None
            await self._fleet.put_service(
                InferenceService(
                    id=self._service_id,
                    base_url=self._client.base_url,
                    status=self._status(),
                    policy_version=self._last_version if self._served is None else self._served,
                    engine=self._engine,
                    num_running=0 if load is None else load.num_running,
                    num_waiting=0 if load is None else load.num_waiting,
                    canary=self._canary.answer,
                    last_good_s=self._canary.last_good_s,
                )
            )

    def _status(self) -> ServiceStatus:
        if self._canary.is_quarantined:
            return ServiceStatus.QUARANTINED
        return ServiceStatus.DOWN if self._served is None else ServiceStatus.UP
