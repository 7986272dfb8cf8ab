"""`CallGuard`: what stands between a toolbox and one server: rate limit, circuit breaker, retries with back-off.

    call ──► breaker open? ──yes──► typed failure at once
                 │ no
                 ▼
           wait for the rate limit ──► send ──► result
                 ▲                       │ failure that may be repeated, with time and retries left
                 └──── jittered pause ◄──┘

Everything, the pauses included, happens within the call's own deadline.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from enum import StrEnum

from agentrl.tools.failures import CallFailedError
from agentrl.tools.requests import failure
from agentrl.tools.server_config import ServerConfig
from agentrl.types import Recovery, ToolResult, ToolStatus

logger = logging.getLogger(__name__)

LONGEST_PAUSE_S = 10.0
# Failures of the server rather than of one call: in a row they open the breaker.
_SERVER_FAILURES = frozenset({ToolStatus.CRASHED, ToolStatus.AUTH, ToolStatus.QUOTA})
_ALIVE = frozenset({ToolStatus.OK, ToolStatus.TOOL_ERROR, ToolStatus.BAD_ARGUMENTS})

_REPEATED = frozenset({ToolStatus.CRASHED, ToolStatus.RATE_LIMITED})

Send = Callable[[float], Awaitable[ToolResult]]
"""One attempt, given the event-loop time by which it must end. Raises CallFailedError."""


class RateLimit:
    """At most `per_s` calls a second, evenly paced after a burst of one second's worth."""

    def __init__(self, per_s: float) -> None:
        self._interval_s = 1 / per_s
        self._burst_s = max(0.0, 1 - self._interval_s)
        self._next = 0.0  # when the next call would be due without the burst

    def reserve(self, now: float, *, latest: float) -> float | None:
        """Seconds to wait before the call; None, and nothing is reserved, if that would be after `latest`."""
        due = max(self._next, now)
        start = max(now, due - self._burst_s)
        if start > latest:
            return None
        self._next = due + self._interval_s
        return start - now


class BreakerState(StrEnum):
    """Whether calls get through."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"  # the next call tries


class CircuitBreaker:
    """Opens after `num_failures` failures in a row; after `pause_s` one call may try again."""

    def __init__(self, *, num_failures: int, pause_s: float) -> None:
        self._num_failures = num_failures
        self._pause_s = pause_s
        self._failures_in_row = 0
        self._open_until = 0.0
        self._last: ToolStatus = ToolStatus.CRASHED

    def state(self, now: float) -> BreakerState:
        """As it is now."""
        if self._failures_in_row < self._num_failures:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._open_until else BreakerState.HALF_OPEN

    def blocked_by(self, now: float) -> ToolStatus | None:
        """The failure that holds it open; None lets the call through, and holds others back until it has ended."""
        state = self.state(now)
        if state is BreakerState.OPEN:
            return self._last
        if state is BreakerState.HALF_OPEN:
            self._open_until = now + self._pause_s
        return None

    def note(self, status: ToolStatus, *, now: float) -> BreakerState | None:
        """Count an outcome; the state it has changed to, if it has. Timeouts, limits and cancellation say nothing."""
        was_closed = self.state(now) is BreakerState.CLOSED
        if status in _ALIVE:
            self._failures_in_row = 0
        elif status in _SERVER_FAILURES:
            self._failures_in_row += 1
            self._last = status
            self._open_until = now + self._pause_s
        is_closed = self._failures_in_row < self._num_failures
        if is_closed == was_closed:
            return None
        return BreakerState.CLOSED if is_closed else BreakerState.OPEN


class CallGuard:
    """Rate limit, breaker and retries of one server."""

    def __init__(self, server: ServerConfig, *, rng: random.Random) -> None:
        self._server = server
        self._rng = rng
        self._rate = None if server.rate_limit_per_s is None else RateLimit(server.rate_limit_per_s)
        self._breaker = CircuitBreaker(num_failures=server.breaker_failures, pause_s=server.breaker_pause_s)

    @property
    def breaker_state(self) -> BreakerState:
        """Whether calls get through now."""
        return self._breaker.state(asyncio.get_running_loop().time())

    async def call(self, tool: str, *, send: Send, deadline_s: float) -> ToolResult:
        """The result of `send`, within `deadline_s` and the server's `timeout_s`; never raises a failure."""
        loop = asyncio.get_running_loop()
        blocked_by = self._breaker.blocked_by(loop.time())
        if blocked_by is not None:
            return failure(blocked_by, f"{tool} is not available at the moment ({blocked_by.value})")
        deadline = loop.time() + min(deadline_s, self._server.timeout_s)
        result = await self._call_until(deadline, tool=tool, send=send)
        changed_to = self._breaker.note(result.status, now=loop.time())
        if changed_to is BreakerState.CLOSED:
            logger.warning("tool server %s answers again", self._server.name)
        elif changed_to is BreakerState.OPEN:
            logger.warning(
                "tool server %s fails again and again (%s): no calls for %g s",
                self._server.name, result.error, self._server.breaker_pause_s,
            )  # fmt: skip
        return result

    async def _call_until(self, deadline: float, *, tool: str, send: Send) -> ToolResult:
        loop = asyncio.get_running_loop()
        for attempt in range(1 + self._server.max_retries):
            if self._rate is not None:
                wait_s = self._rate.reserve(loop.time(), latest=deadline)
                if wait_s is None:
                    limit = f"{self._server.rate_limit_per_s:g} calls/s"
                    return failure(ToolStatus.RATE_LIMITED, f"{tool} was not called: its limit is {limit}")
                await asyncio.sleep(wait_s)
            try:
                return await send(deadline)
            except CallFailedError as error:
                last = error
            pause_s = self._pause_before_repeat(last, attempt=attempt)
            if pause_s is None or loop.time() + pause_s >= deadline:
                break
            await asyncio.sleep(pause_s)
        return failure(last.status, str(last))

    def _pause_before_repeat(self, error: CallFailedError, *, attempt: int) -> float | None:
        """Seconds before the next attempt; None if the call must not be repeated, or a repeat is of no use."""
        is_stateless = self._server.recovery is Recovery.STATELESS
        if error.status not in _REPEATED or not (error.was_refused or is_stateless):
            return None
        backed_off_s = min(self._server.retry_pause_s * 2.0**attempt, LONGEST_PAUSE_S) * self._rng.uniform(0.5, 1.5)
        return max(backed_off_s, (error.retry_after_s or 0.0) * self._rng.uniform(1.0, 1.25))
