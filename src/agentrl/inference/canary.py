"""Asks one service the canary prompts, for its registrar: does it generate at all, and with the right weights?

    check(policy) ─► ask ── no answer and no progress ──► EngineError(TIMEOUT): hung, or paused with nobody loading
                      │
                      ├── right ───► last_good_s moves on; an open quarantine is lifted
                      ├── unknown ─► neither: no reference, and fewer than three services to vote
                      └── wrong ───► quarantine since last_good_s, EngineError(INVALID_SAMPLE)

A full engine may keep a canary waiting for long; only one whose load stands still meanwhile counts as hung.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.algo.canary import canary_prompts, judged_deviation
from agentrl.errors import EngineError, EngineErrorKind
from agentrl.inference.client import EngineClient
from agentrl.inference.replies import PromptScore
from agentrl.protocols import FleetStore
from agentrl.types import CanaryAnswer, EngineQuarantine, PolicyVersion

logger = logging.getLogger(__name__)

_PATIENCE = 30  # timeouts a busy engine may take
_SMALLEST_VOCABULARY = 256  # of services that do not tell theirs


@dataclass(frozen=True, slots=True, kw_only=True)
class CanarySettings:
    """See the settings `canary_*`."""

    tolerance: float = 0.2
    interval_s: float = 10.0
    timeout_s: float = 20.0


class ServiceCanary:
    """The canary checks of one service, and what they found: where it serves several runs, those of `run_name`."""

    def __init__(
        self,
        client: EngineClient,
        fleet: FleetStore,
        *,
        service_id: str,
        settings: CanarySettings,
        run_name: str | None = None,
    ) -> None:
        self.answer: CanaryAnswer | None = None
        self.last_good_s = 0.0
        self.is_quarantined = False
        self._client = client
        self._fleet = fleet
        self._service_id = service_id
        self._settings = settings
        self._run_name = run_name
        self._unwritten: EngineQuarantine | None = None

    async def restore(self) -> None:
        """Take over what an earlier registrar of this service wrote. Raises StoreError."""
        for service in await self._fleet.list_services():
            if service.id == self._service_id:
                self.answer, self.last_good_s = service.canary, service.last_good_s
        self.is_quarantined = bool(await self._open_quarantines())

    async def check(self, policy: PolicyVersion | None) -> None:
        """Ask and judge. `policy` is the version the service should serve; None: the start model, as version 0.

        Raises EngineError if the service does not answer, serves another version, or is not known to be right while
        it is quarantined; StoreError.
        """
        version = 0 if policy is None else policy.version
        answer = await self._ask(await self._prompts(policy))
        if answer.policy_version != version:
            message = f"{self._client.base_url} answered a canary as version {answer.policy_version}, not {version}"
            raise EngineError(message, kind=EngineErrorKind.OVERLOADED)
        self.answer = answer
        reference = None if policy is None else policy.canary
        peers = [] if reference is not None else await self._peers(version)
        off = judged_deviation(answer.logprobs, reference=reference, peers=peers)
        if off is not None and off > self._settings.tolerance:
            await self._quarantine(version, off=off)
        await self._write()
        if off is None and self.is_quarantined:
            message = f"{self._client.base_url} stays quarantined: nothing says what its canaries should be"
            raise EngineError(message, kind=EngineErrorKind.INVALID_SAMPLE)
        if off is not None:
            await self._lift(answer)

    async def _prompts(self, policy: PolicyVersion | None) -> Sequence[Sequence[int]]:
        if policy is not None and policy.canary is not None:
            return policy.canary.prompts
        vocab_size = (await self._client.model_info()).vocab_size
        return canary_prompts(vocab_size if vocab_size is not None else _SMALLEST_VOCABULARY)

    async def _ask(self, prompts: Sequence[Sequence[int]]) -> CanaryAnswer:
        began, load = time.time(), await self._client.load()
        standing = (load.num_running, load.num_used_tokens)
        scores = [await self._score(prompt, standing=standing) for prompt in prompts]
        versions = {score.policy_version for score in scores}
        if len(versions) > 1:
            message = f"{self._client.base_url}: the weights changed during a canary"
            raise EngineError(message, kind=EngineErrorKind.OVERLOADED)
        first, last = scores[0].engine_times, scores[-1].engine_times
        return CanaryAnswer(
            policy_version=versions.pop(),
            logprobs=tuple(value for score in scores for value in score.logprobs),
            started_s=began if first is None else first[0],
            finished_s=time.time() if last is None else last[1],
        )

    async def _score(self, prompt: Sequence[int], *, standing: tuple[int, int]) -> PromptScore:
        """One prompt. Gives up when the load stands still for `timeout_s`, and after `_PATIENCE` times that anyway."""
        timeout_s = self._settings.timeout_s
        rid = f"canary-{uuid.uuid4().hex}"
        scoring = asyncio.create_task(
            self._client.score_prompt(prompt, rid=rid, timeout_s=_PATIENCE * timeout_s, run_name=self._run_name),
            name=rid,
        )
        try:
            while not (await asyncio.wait({scoring}, timeout=timeout_s))[0]:
                load = await self._client.load()
                # Answered meanwhile: not the engine stood still, but this process, or both.
                if (load.num_running, load.num_used_tokens) == standing and not scoring.done():
                    message = f"{self._client.base_url}: no answer to a canary and no progress within {timeout_s:g} s"
                    raise EngineError(message, kind=EngineErrorKind.TIMEOUT)
                standing = (load.num_running, load.num_used_tokens)
            return scoring.result()
        finally:
            if not scoring.done():
                scoring.cancel()
                await asyncio.wait({scoring})

    async def _peers(self, version: int) -> list[Sequence[float]]:
        return [
            service.canary.logprobs
            for service in await self._fleet.list_services()
            if service.id != self._service_id and service.canary and service.canary.policy_version == version
        ]

    async def _quarantine(self, version: int, *, off: float) -> None:
        """Exclude what the service sampled since its last right answer, and raise."""
        message = (
            f"service {self._service_id} QUARANTINED: its canaries at policy version {version} are off by {off:.4g} "
            f"nats (canary_tolerance = {self._settings.tolerance:g})"
        )
        if not self.is_quarantined:
            logger.error("%s; tokens it sampled since its last right canary are not trained", message)
        self.is_quarantined = True
        self._unwritten = EngineQuarantine(
            id=f"{self._service_id}@{int(self.last_good_s * 1000)}",
            service_id=self._service_id,
            policy_version=version,
            deviation=off,
            since_s=self.last_good_s,
        )
        await self._write()
        raise EngineError(message, kind=EngineErrorKind.INVALID_SAMPLE)

    async def _write(self) -> None:
        """Write the quarantine, also one that could not be written before. Nothing is lifted until it is."""
        if self._unwritten is not None:
            await self._fleet.raise_engine_quarantine(self._unwritten)
            self._unwritten = None

    async def _lift(self, answer: CanaryAnswer) -> None:
        if self.is_quarantined:
            for quarantine in await self._open_quarantines():
                await self._fleet.lift_engine_quarantine(quarantine.id, until_s=answer.started_s)
            logger.warning("service %s answers its canaries rightly again", self._service_id)
            self.is_quarantined = False
        self.last_good_s = answer.started_s

    async def _open_quarantines(self) -> list[EngineQuarantine]:
        quarantines = await self._fleet.list_engine_quarantines()
        return [item for item in quarantines if item.service_id == self._service_id and item.until_s is None]
