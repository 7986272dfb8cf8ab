"""The sessions of one MCP server: shared by all Records, or one for each Record that calls it."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import mcp_types as types

from agentrl.errors import ToolServerError
from agentrl.tools.failures import CallFailedError, failure_of_meta
from agentrl.tools.guard import BreakerState, CallGuard
from agentrl.tools.results import content_items, result_text
from agentrl.tools.server_config import ServerConfig
from agentrl.tools.session import McpSession, SessionClosedError, SessionLostError
from agentrl.types import Recovery, ToolResult, ToolStatus

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedTool:
    """One tool as a server lists it."""

    server: str
    name: str
    remote_name: str  # what a call names
    description: str
    parameters: Mapping[str, Any]


class ToolServer(Protocol):
    """Whatever runs the tools of one `ServerConfig`."""

    @property
    def config(self) -> ServerConfig:
        """How it was configured."""
        ...

    @property
    def breaker_state(self) -> BreakerState:
        """Whether its circuit breaker lets calls through."""
        ...

    async def start(self) -> list[ListedTool]:
        """Connect and list the tools. Raises ToolServerError."""
        ...

    async def call(self, tool: str, arguments: Mapping[str, Any], *, deadline_s: float) -> ToolResult:
        """One call; the outcome is typed, never raised."""
        ...

    def for_record(self) -> ToolServer:
        """What serves the calls of one Record: itself, or something of the Record's own that it must close."""
        ...

    async def close(self) -> None:
        """End every child process, connection and running call. Safe to repeat."""
        ...


class SharedServer:
    """Implements ToolServer with sessions that all Records share; a call takes the least busy one."""

    def __init__(self, config: ServerConfig, *, connect_timeout_s: float, rng: random.Random) -> None:
        self.config = config
        self._guard = CallGuard(config, rng=rng)
        self._sessions = [
            McpSession(config, connect_timeout_s=connect_timeout_s, rng=rng) for _ in range(config.sessions)
        ]

    @property
    def breaker_state(self) -> BreakerState:
        """See ToolServer.breaker_state."""
        return self._guard.breaker_state

    async def start(self) -> list[ListedTool]:
        """Connect every session; the tools of the first."""
        listed = await all_or_first_error(session.start() for session in self._sessions)
        return [_listed(tool, self.config) for tool in listed[0]]

    async def call(self, tool: str, arguments: Mapping[str, Any], *, deadline_s: float) -> ToolResult:
        """One call on the least busy session that is connected."""
        limit_s = min(deadline_s, self.config.timeout_s)

        async def send(deadline: float) -> ToolResult:
            session = min(self._sessions, key=lambda candidate: (not candidate.is_connected, candidate.in_flight))
            return await _call_session(session, tool, arguments, deadline=deadline, limit_s=limit_s)

        return await self._guard.call(tool, send=send, deadline_s=deadline_s)

    def for_record(self) -> SharedServer:
        """Itself: nothing of it belongs to a Record."""
        return self

    async def close(self) -> None:
        """End all sessions."""
        await asyncio.gather(*(session.close() for session in self._sessions))


class PerRolloutServer:
    """Implements ToolServer for tools that keep state: every Record gets a session of its own, at most `sessions`."""

    def __init__(self, config: ServerConfig, *, connect_timeout_s: float, rng: random.Random) -> None:
        self.config = config
        self.guard = CallGuard(config, rng=rng)
        self.slots = asyncio.Semaphore(config.sessions)
        self._connect_timeout_s = connect_timeout_s
        self._rng = rng
        self._leases: set[RecordSession] = set()

    def new_session(self) -> McpSession:
        """A session that is not started yet."""
        return McpSession(
            self.config,
            connect_timeout_s=self._connect_timeout_s,
            rng=self._rng,
            reconnects=self.config.recovery is Recovery.STATELESS,
        )

    @property
    def breaker_state(self) -> BreakerState:
        """See ToolServer.breaker_state."""
        return self.guard.breaker_state

    async def start(self) -> list[ListedTool]:
        """List the tools with a session that nobody uses afterwards."""
        session = self.new_session()
        try:
            return [_listed(tool, self.config) for tool in await session.start()]
        finally:
            await session.close()

    async def call(self, tool: str, arguments: Mapping[str, Any], *, deadline_s: float) -> ToolResult:
        """One call outside any Record: in a session that ends with it."""
        lease = self.for_record()
        try:
            return await lease.call(tool, arguments, deadline_s=deadline_s)
        finally:
            await lease.close()

    def for_record(self) -> RecordSession:
        """A session that opens with its first call."""
        lease = RecordSession(self)
        self._leases.add(lease)
        return lease

    def forget(self, lease: RecordSession) -> None:
        """Called by a lease that has ended."""
        self._leases.discard(lease)

    async def close(self) -> None:
        """End the sessions of all Records."""
        await asyncio.gather(*(lease.close() for lease in list(self._leases)))


class RecordSession:
    """Implements ToolServer for one Record of a `per_rollout` server."""

    def __init__(self, server: PerRolloutServer) -> None:
        self.config = server.config
        self._server = server
        self._session = server.new_session()
        self._opening: asyncio.Task[list[types.Tool]] | None = None
        self._holds_slot = False
        self._is_closed = False

    @property
    def breaker_state(self) -> BreakerState:
        """That of its server: all Records share it."""
        return self._server.breaker_state

    async def start(self) -> list[ListedTool]:
        """Open the session now, and list its tools."""
        return [_listed(tool, self.config) for tool in await self._opened()]

    async def call(self, tool: str, arguments: Mapping[str, Any], *, deadline_s: float) -> ToolResult:
        """One call; the first opens the session, within its own deadline. After a crash there is no state to go on."""
        limit_s = min(deadline_s, self.config.timeout_s)

        async def send(deadline: float) -> ToolResult:
            await self._open_until(deadline, tool=tool)
            try:
                return await _call_session(self._session, tool, arguments, deadline=deadline, limit_s=limit_s)
            except CallFailedError as error:
                if error.status is ToolStatus.CANCELLED and not self._is_closed:
                    message = f"{tool} crashed: the state of its session is lost"
                    raise CallFailedError(message, status=ToolStatus.CRASHED) from error
                raise

        return await self._server.guard.call(tool, send=send, deadline_s=deadline_s)

    def for_record(self) -> RecordSession:
        """Itself: it is one Record's already."""
        return self

    async def close(self) -> None:
        """End the session, also one that is still opening, and give its slot to the next Record."""
        self._is_closed = True
        self._server.forget(self)
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait({self._opening})
        await self._session.close()
        if self._holds_slot:
            self._holds_slot = False
            self._server.slots.release()

    async def _open_until(self, deadline: float, *, tool: str) -> None:
        if self._is_closed:
            raise CallFailedError(f"{tool} was cancelled: the tools were closed", status=ToolStatus.CANCELLED)
        try:
            async with asyncio.timeout_at(deadline):
                await self._opened()
        except TimeoutError:
            raise CallFailedError(f"{tool} was not called: no session in time", status=ToolStatus.TIMEOUT) from None
        except ToolServerError as error:
            logger.warning("%s cannot be called: %s", tool, error)
            status = ToolStatus.CANCELLED if self._is_closed else ToolStatus.CRASHED
            raise self._session.refusal or CallFailedError(f"{tool} could not be started", status=status) from error

    async def _opened(self) -> list[types.Tool]:
        if self._opening is None:
            self._opening = asyncio.create_task(self._open(), name=f"open-{self.config.name}")
            self._opening.add_done_callback(_read_error)
        await asyncio.wait({self._opening})  # not shield: a close that ends the opening must not look like our own end
        if self._opening.cancelled():
            raise CallFailedError("the tools were closed", status=ToolStatus.CANCELLED)
        return self._opening.result()

    async def _open(self) -> list[types.Tool]:
        await self._server.slots.acquire()
        self._holds_slot = True
        return await self._session.start()


def _read_error(opening: asyncio.Task[Any]) -> None:
    if not opening.cancelled():
        opening.exception()  # so that an opening nobody waits for any more logs nothing


def _listed(tool: types.Tool, config: ServerConfig) -> ListedTool:
    return ListedTool(
        server=config.name,
        name=tool.name,
        remote_name=tool.name,
        description=tool.description or "",
        parameters=tool.input_schema,
    )


async def _call_session(
    session: McpSession, tool: str, arguments: Mapping[str, Any], *, deadline: float, limit_s: float
) -> ToolResult:
    try:
        async with asyncio.timeout_at(deadline):
            return _to_result(await session.call(tool, arguments))
    except TimeoutError:
        raise _too_late(session, tool, limit_s=limit_s) from None
    except SessionClosedError:
        raise CallFailedError(f"{tool} was cancelled: the tools were closed", status=ToolStatus.CANCELLED) from None
    except SessionLostError as error:
        logger.info("the session was lost during a call of %s: %s", tool, error)
        raise CallFailedError(f"{tool} crashed", status=ToolStatus.CRASHED) from error


def _too_late(session: McpSession, tool: str, *, limit_s: float) -> CallFailedError:
    if not session.is_connected:
        logger.warning("%s cannot be called, its server is down: %s", tool, session.last_error)
        return CallFailedError(f"{tool} is not available: its server is down", status=ToolStatus.CRASHED)
    session.check_health()
    return CallFailedError(f"{tool} did not answer within {limit_s:g} s", status=ToolStatus.TIMEOUT)


def _to_result(result: types.CallToolResult) -> ToolResult:
    text = result_text(result)
    items, structured = content_items(result), result.structured_content
    if not result.is_error:
        return ToolResult(status=ToolStatus.OK, content=text, items=items, structured=structured)
    message = text or "the tool reported an error"
    declared = failure_of_meta(result.meta, message)
    if declared is not None:
        raise declared
    return ToolResult(status=ToolStatus.TOOL_ERROR, content=text, error=message, items=items, structured=structured)


async def all_or_first_error(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results; as soon as one fails, its error, once the others have ended."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        if tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
