"""RoutedClient: the GenerationClient samplers use. Spreads requests over every inference service that is UP.

    request -> service of its session (prefix cache), else the least loaded one
            -> failed in a way that may pass, or aborted (weight update, restart)?  back off, choose again
            -> could not be reached?  not chosen again before its next heartbeat
            -> nothing UP?  wait for one; a DRAINING one is there for the sessions it had
            -> until request.deadline_s is over; then EngineError

The fleet listing is read about once a second, and again after a failure. Heartbeats are judged by the database clock.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

import aiohttp

from agentrl.errors import EngineError, EngineErrorKind, StoreError
from agentrl.inference.client import EngineClient, new_session
from agentrl.protocols import FleetStore
from agentrl.types import GenerateReply, GenerateRequest, InferenceService, ServiceStatus

logger = logging.getLogger(__name__)

_MAX_SESSIONS = 20_000
_BACKOFF_FIRST_S = 0.05
_BACKOFF_MAX_S = 2.0
_SUSPEND_S = 1.0
_LISTING_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listing:
    """What was UP or DRAINING, and fresh, at `read_at` (monotonic seconds), and our own share of their load then."""

    services: tuple[InferenceService, ...]
    read_at: float
    own_in_flight: Counter[str]


class RoutedClient:
    """Completions from whatever service of the fleet can give them; safe for many concurrent callers of one loop.

    A service counts while its heartbeat is younger than `heartbeat_timeout_s`. `run_name` is needed where services of a
    fleet serve several runs: tokens sampled from the weights of others are refused. `vocab_size` bounds the ids sent;
    left out, each service is asked.
    """

    def __init__(
        self,
        fleet: FleetStore,
        *,
        run_name: str | None = None,
        vocab_size: int | None = None,
        heartbeat_timeout_s: float = 15.0,
        refresh_s: float = 1.0,
        rng: random.Random | None = None,
    ) -> None:
        self._fleet = fleet
        self._run_name = run_name
        self._vocab_size = vocab_size
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._refresh_s = refresh_s
        self._rng = rng or random.Random()
        self._session: aiohttp.ClientSession | None = None
        self._clients: dict[str, EngineClient] = {}
        self._listing = _Listing(services=(), read_at=float("-inf"), own_in_flight=Counter())
        self._refresh_lock = asyncio.Lock()
        self._sticky: OrderedDict[str, str] = OrderedDict()
        self._in_flight: Counter[str] = Counter()
        self._suspended_until: dict[str, float] = {}
        self._unreachable_at: dict[str, datetime | None] = {}  # the heartbeat a service had when it failed

    async def close(self) -> None:
        """Release connections. Generations still running are cancelled by their callers, not here."""
        for client in self._clients.values():
            await client.close()
        self._clients.clear()
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """One completion. Retries and waits within `request.deadline_s`, then raises the last failure."""
        deadline = time.monotonic() + request.deadline_s
        failure = EngineError(
            f"{request.rid}: no inference service was UP for {request.deadline_s:.1f} s", kind=EngineErrorKind.TIMEOUT
        )
        backoff_s, attempt = _BACKOFF_FIRST_S, 0
        while (remaining_s := deadline - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(remaining_s):
                    service = await self._choose(request.session)
            except TimeoutError:
                break
            if service is not None:
                try:
                    return await self._attempt(request, service=service, attempt=attempt, deadline=deadline)
                except EngineError as error:
                    if not (error.retryable or error.kind is EngineErrorKind.ABORTED):
                        raise
                    failure = error
                    self._note_failure(service, error)
                attempt += 1
            pause_s = backoff_s * (0.5 + self._rng.random())
            backoff_s = min(_BACKOFF_MAX_S, backoff_s * 2)
            await asyncio.sleep(max(0.0, min(pause_s, deadline - time.monotonic())))
        raise EngineError(
            f"{request.rid}: gave up after {request.deadline_s:.1f} s and {attempt} attempts: {failure}",
            kind=failure.kind,
        )

    async def _attempt(
        self, request: GenerateRequest, *, service: InferenceService, attempt: int, deadline: float
    ) -> GenerateReply:
        # Another id per attempt: the previous one may still be live on the server, which refuses duplicates.
        attempted = replace(
            request, rid=f"{request.rid}-a{attempt:03d}", deadline_s=max(0.001, deadline - time.monotonic())
        )
        self._in_flight[service.id] += 1
        generation = asyncio.create_task(self._client(service).generate(attempted, service_id=service.id))
        try:
            while not generation.done():
                await asyncio.wait({generation}, timeout=self._refresh_s)
                if not generation.done() and service.base_url not in {item.base_url for item in await self._services()}:
                    message = f"{service.id} went DOWN or silent during {attempted.rid}"
                    raise EngineError(message, kind=EngineErrorKind.UNREACHABLE)
            return generation.result()
        finally:
            self._in_flight[service.id] -= 1
            if not generation.done():
                generation.cancel()
                await asyncio.wait({generation})

    async def _choose(self, session: str) -> InferenceService | None:
        """The session's service while it lasts, else the least loaded one; None when nothing is UP."""
        services = [service for service in await self._services() if self._may_be_tried(service)]
        sticky_id = self._sticky.get(session) if session else None
        chosen = next((service for service in services if service.id == sticky_id), None)
        if chosen is None:
            services = [service for service in services if service.status is ServiceStatus.UP]
            if not services:
                return None
            chosen = min(services, key=lambda service: (self._load_of(service), self._rng.random()))
        if session:
            self._sticky[session] = chosen.id
            self._sticky.move_to_end(session)
            if len(self._sticky) > _MAX_SESSIONS:
                self._sticky.popitem(last=False)
        return chosen

    def _may_be_tried(self, service: InferenceService) -> bool:
        """Whether no failure speaks against it. The entry of a killed one stays UP until its heartbeat is too old."""
        if self._suspended_until.get(service.id, 0.0) > time.monotonic():
            return False
        return service.id not in self._unreachable_at or service.heartbeat_at != self._unreachable_at[service.id]

    def _load_of(self, service: InferenceService) -> int:
        """Our requests in flight plus what other processes had there when the listing was read."""
        reported = service.num_running + service.num_waiting
        return self._in_flight[service.id] + max(0, reported - self._listing.own_in_flight[service.id])

    async def _services(self) -> Sequence[InferenceService]:
        async with self._refresh_lock:
            age_s = time.monotonic() - self._listing.read_at
            # With nothing UP, look more often: an engine that restarts should not cost a whole period.
            if age_s >= (self._refresh_s if self._listing.services else min(self._refresh_s, 0.2)):
                await self._refresh()
            return self._listing.services

    async def _refresh(self) -> None:
        try:
            async with asyncio.timeout(_LISTING_TIMEOUT_S):  # the store may be waiting for a database that is away
                services, server_time = await self._fleet.list_services(), await self._fleet.server_time()
        except (StoreError, TimeoutError) as error:
            logger.warning("fleet listing failed, using the last one: %s", str(error) or "no answer in time")
            self._listing = replace(self._listing, read_at=time.monotonic())
            return
        fresh = [
            service
            for service in services
            if service.status in {ServiceStatus.UP, ServiceStatus.DRAINING}
            and service.heartbeat_at is not None
            and (server_time - service.heartbeat_at).total_seconds() < self._heartbeat_timeout_s
        ]
        self._listing = _Listing(
            services=tuple(fresh), read_at=time.monotonic(), own_in_flight=Counter(self._in_flight)
        )

    def _note_failure(self, service: InferenceService, error: EngineError) -> None:
        """Read the listing anew, and leave a service that cannot be reached alone for a moment."""
        logger.info("service %s: %s (%s); trying again", service.id, error, error.kind)
        self._listing = replace(self._listing, read_at=float("-inf"))
        if error.kind in {EngineErrorKind.UNREACHABLE, EngineErrorKind.OVERLOADED}:
            self._suspended_until[service.id] = time.monotonic() + _SUSPEND_S
        if error.kind is EngineErrorKind.UNREACHABLE:
            self._unreachable_at[service.id] = service.heartbeat_at

    def _client(self, service: InferenceService) -> EngineClient:
        if self._session is None:
            self._session = new_session()
        client = self._clients.get(service.base_url)
        if client is None:
            client = EngineClient(
                service.base_url, run_name=self._run_name, vocab_size=self._vocab_size, session=self._session
            )
            self._clients[service.base_url] = client
        return client
