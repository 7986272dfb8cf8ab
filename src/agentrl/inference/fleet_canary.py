"""The canary checks of one service of a fleet: each run it serves has its own reference, quarantine and span.

Runs that are served from the same weights stand or fall together: what is wrong for one is trusted for none.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from agentrl.errors import EngineError, EngineErrorKind, StoreError
from agentrl.inference.canary import CanarySettings, ServiceCanary
from agentrl.inference.client import EngineClient
from agentrl.inference.fleet_view import RunView
from agentrl.types import PolicyVersion

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class FleetCanaries:
    """What the canaries of every run of the fleet found at one service, for its registrar."""

    client: EngineClient
    service_id: str
    settings: CanarySettings
    by_run: dict[str, ServiceCanary] = field(default_factory=dict)

    async def take_over(self, views: Mapping[str, RunView]) -> dict[str, RunView]:
        """The runs whose quarantines are known, after learning those of new runs. The others are left out, and logged.

        A run that leaves is not forgotten: a quarantine may still have to be written when its database is back.
        """
        for name, view in views.items():
            if name in self.by_run:
                continue
            canary = ServiceCanary(
                self.client, view.store, service_id=self.service_id, settings=self.settings, run_name=name
            )
            try:
                await canary.restore()
            except StoreError as error:
                logger.warning("run %s is not served for now: %s", name, error)
                continue
            self.by_run[name] = canary
        return {name: view for name, view in views.items() if name in self.by_run}

    async def check(self, policies: Mapping[str, PolicyVersion | None]) -> None:
        """Ask and judge for each of these runs. `policies` is what the engine should serve them, as for ServiceCanary.

        Raises EngineError if the service does not answer or is wrong for one of them; StoreError.
        """
        wrong: EngineError | None = None
        for name, policy in policies.items():
            try:
                await self.by_run[name].check(policy)
            except EngineError as error:
                if error.kind is not EngineErrorKind.INVALID_SAMPLE:
                    raise
                wrong = wrong or error  # the others are asked, too: each has its own quarantine
        if wrong is not None:
            raise wrong

    def has_quarantine(self, names: Iterable[str]) -> bool:
        """Whether the service is quarantined for one of these runs."""
        return any(self.by_run[name].is_quarantined for name in names)
