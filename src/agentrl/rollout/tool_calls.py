"""How a tool call is made, by `tool_journal` (docs/tool_journal.md).

    live      journalled tools: the kept result of this call, else the tool; other tools: the tool
    cache     stateless tools: the result of an equal call that is young enough, else live, and kept; others: live
    replay    the recorded result, else `not_recorded`; the tool is never called
    fault     by chance of this call's own seed: a failure in place of the call, or a wait before it; else live

Live calls are paid for, those answered by the journal are not.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Protocol, TypeVar

from agentrl.config import JournalConfig
from agentrl.config.costs import FaultKind
from agentrl.protocols import Store, Toolbox, ToolJournal
from agentrl.rollout.deadlines import stopped_clock
from agentrl.rollout.recorded_calls import RecordedCalls, not_recorded
from agentrl.rollout.recovery import call_once
from agentrl.rollout.spending import Spending
from agentrl.types import Recovery, ResultOrigin, ToolCall, ToolRequest, ToolResult, ToolSpec, ToolStatus

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingCall:
    """One call that is about to be made: what the model asked, who asks, and where it goes."""

    request: ToolRequest
    call: ToolCall
    spec: ToolSpec
    toolbox: Toolbox
    deadline_s: float


class ToolCaller(Protocol):
    """Makes calls in one mode."""

    async def send(self, pending: PendingCall) -> ToolResult:
        """The typed result. Raises BudgetSpentError if the call cannot be paid for, and nothing else."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveCaller:
    """Calls the tool; where it is journalled, once."""

    journal: ToolJournal
    spending: Spending = field(default_factory=Spending)

    async def send(self, pending: PendingCall) -> ToolResult:
        """See ToolCaller.send."""
        if pending.spec.recovery is Recovery.JOURNALLED:
            return await call_once(pending.call, make=lambda: self._pay_and_call(pending), journal=self.journal)
        return await self._pay_and_call(pending)

    async def _pay_and_call(self, pending: PendingCall) -> ToolResult:
        at_most = self.spending.prices.of_tool(pending.spec).nano_usd()
        async with self.spending.paid(f"a call of {pending.spec.name}", at_most=at_most) as bill:
            result = await pending.toolbox.call(pending.request, deadline_s=pending.deadline_s)
            if not result.status.was_sent:
                bill.cost_nano_usd = 0
        return replace(result, cost_nano_usd=bill.cost_nano_usd)


class CachingCaller:
    """Answers from equal calls. Of equal calls at the same time in one process only the first is made."""

    def __init__(
        self, live: ToolCaller, *, store: Store, ttl_s: Mapping[str, float], recorded: RecordedCalls | None
    ) -> None:
        self._live = live
        self._store = store
        self._ttl_s = ttl_s
        self._recorded = recorded
        self._in_flight: dict[str, _Turnstile] = {}

    async def send(self, pending: PendingCall) -> ToolResult:
        """See ToolCaller.send."""
        ttl_s = of_tool(self._ttl_s, pending.spec, otherwise=0.0)
        if pending.spec.recovery is not Recovery.STATELESS or not ttl_s:
            return await self._live.send(pending)
        started = asyncio.get_running_loop().time()
        key = pending.call.content_hash
        turnstile = self._in_flight.setdefault(key, _Turnstile())
        turnstile.num_waiting += 1
        try:
            async with asyncio.timeout(pending.deadline_s):
                await turnstile.lock.acquire()
        except TimeoutError:
            return _timed_out(pending)
        finally:
            turnstile.num_waiting -= 1
        try:
            waited_s = asyncio.get_running_loop().time() - started
            return await self._find_or_call(replace(pending, deadline_s=pending.deadline_s - waited_s), ttl_s=ttl_s)
        finally:
            turnstile.lock.release()
            if not turnstile.num_waiting:
                self._in_flight.pop(key, None)

    async def _find_or_call(self, pending: PendingCall, *, ttl_s: float) -> ToolResult:
        with stopped_clock():
            known = await self._store.find_equal(pending.call, max_age_s=ttl_s)
            if known is None and self._recorded is not None:
                since = await self._store.server_time() - timedelta(seconds=ttl_s)
                known = self._recorded.find_equal(pending.call, since=since)
        if known is not None:
            return replace(known, origin=ResultOrigin.CACHE)
        result = await self._live.send(pending)
        if result.status is not ToolStatus.OK:  # an error may be gone the next time
            return result
        with stopped_clock():
            kept = await self._store.put_equal(pending.call, replace(result, cost_nano_usd=0), max_age_s=ttl_s)
        return replace(kept, cost_nano_usd=result.cost_nano_usd)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayingCaller:
    """Answers from a journal file alone."""

    recorded: RecordedCalls

    async def send(self, pending: PendingCall) -> ToolResult:
        """See ToolCaller.send."""
        known = self.recorded.find(pending.call)
        return not_recorded(pending.spec.name) if known is None else replace(known, origin=ResultOrigin.REPLAY)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultyCaller:
    """Injects failures. The same call of the same Record meets the same fate under the same seed."""

    live: ToolCaller
    faults: Mapping[str, Mapping[FaultKind, float]]
    slow_s: float
    seed: int

    async def send(self, pending: PendingCall) -> ToolResult:
        """See ToolCaller.send."""
        fault = self._draw(pending)
        if fault is None:
            return await self.live.send(pending)
        name, limit_s = pending.spec.name, pending.deadline_s
        if fault == "slow":
            await asyncio.sleep(min(self.slow_s, limit_s))
            if self.slow_s >= limit_s:
                return replace(_timed_out(pending), origin=ResultOrigin.FAULT)
            return await self.live.send(replace(pending, deadline_s=limit_s - self.slow_s))
        if fault == "timeout":
            await asyncio.sleep(limit_s)
            return replace(_timed_out(pending), origin=ResultOrigin.FAULT)
        message = {"crashed": "crashed", "rate_limited": "is called too often", "tool_error": "failed"}[fault]
        text = f"{name} {message} (injected)"
        return ToolResult(status=ToolStatus(fault), content=text, error=text, origin=ResultOrigin.FAULT)

    def _draw(self, pending: PendingCall) -> FaultKind | None:
        rates = of_tool(self.faults, pending.spec, otherwise={})
        drawn = random.Random(f"{self.seed}/{pending.call.key}").random()
        for kind, rate in rates.items():
            drawn -= rate
            if drawn < 0:
                return kind
        return None


def choose_caller(
    config: JournalConfig, *, seed: int, store: Store, spending: Spending, recorded: RecordedCalls | None
) -> ToolCaller:
    """The caller of a run's mode. `recorded`: what its `tool_journal_file` holds."""
    live = LiveCaller(journal=store, spending=spending)
    match config.tool_journal:
        case "cache":
            return CachingCaller(live, store=store, ttl_s=config.tool_cache_ttl_s, recorded=recorded)
        case "replay":
            assert recorded is not None  # JournalConfig refuses replay without a file
            return ReplayingCaller(recorded=recorded)
        case "fault":
            return FaultyCaller(live=live, faults=config.tool_faults, slow_s=config.tool_fault_slow_s, seed=seed)
        case _:
            return live


def of_tool(settings: Mapping[str, T], spec: ToolSpec, *, otherwise: T) -> T:
    """The entry of a table of settings by tool that means this one."""
    return next((settings[key] for key in spec.setting_keys if key in settings), otherwise)


@dataclass(slots=True, kw_only=True)
class _Turnstile:
    """Lets equal calls through one by one."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_waiting: int = 0


def _timed_out(pending: PendingCall) -> ToolResult:
    message = f"{pending.spec.name} did not answer within {pending.deadline_s:g} s"
    return ToolResult(status=ToolStatus.TIMEOUT, content=message, error=message)
