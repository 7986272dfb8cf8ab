"""One session with one MCP server: an owner task that keeps a connection open, and calls that share it.

    owner task    connect -> serve until lost -> back off -> connect ...          (restarts a stdio server)
    caller        slot -> wait for a connection -> own task runs the SDK call -> outcome, or SessionLostError

The SDK's cancel scopes live in a connection task of their own, because a dying transport cancels the task that owns
it: neither a caller nor the owner is ever cancelled by that. A call that is cancelled or too late tells the server so
and frees its slot; the session stays usable.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import anyio
import httpx2
import mcp_types as types
from mcp import Client, MCPError
from pydantic import ValidationError

from agentrl.errors import ToolServerError
from agentrl.tools.failures import CallFailedError, failure_of_error
from agentrl.tools.server_config import ServerConfig, SessionScope, TransportKind
from agentrl.tools.transport import ConnectionNotes, open_transport
from agentrl.types import ToolStatus

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 10.0
_CANCEL_GRACE_S = 1.0
_CLOSE_TIMEOUT_S = 10.0
_KILL_TIMEOUT_S = 8.0  # the SDK's own escalation to SIGKILL takes up to 6.5 s
_MAX_TOOL_PAGES = 100
_NOT_STARTED = "not started"
# What the SDK puts in place of an HTTP error without a JSON-RPC body: the server did not take the call.
_HTTP_STAND_INS = frozenset({"Session terminated", "Server returned an error response"})


class SessionLostError(Exception):
    """The connection ended before the answer came; whether the tool ran is unknown."""


class SessionClosedError(Exception):
    """The session was closed by its owner."""


@dataclass(frozen=True, slots=True, eq=False)
class _Connection:
    """One life of the connection."""

    client: Client
    lost: asyncio.Future[None]
    tools: list[types.Tool]
    calls: set[asyncio.Task[Any]] = field(default_factory=set)


class McpSession:
    """Keeps one session to `server` alive between `start` and `close`. All methods belong to one event loop."""

    def __init__(
        self, server: ServerConfig, *, connect_timeout_s: float, rng: random.Random, reconnects: bool = True
    ) -> None:
        self._server = server
        self._reconnects = reconnects  # else a lost connection is the end, as after `close`
        self._connect_timeout_s = server.connect_timeout_s or connect_timeout_s
        self._rng = rng
        self._kind = server.kind
        self._slots = asyncio.Semaphore(server.max_in_flight)
        self._in_flight = 0
        self._connection: _Connection | None = None
        self._changed = asyncio.Event()  # a connection came or went, a close or a health check was asked for
        self._ready = asyncio.Event()  # connected, closing or refused: callers need not wait
        self._closing = False
        self._health_check_wanted = False
        self._health_known = asyncio.Event()  # a health check ended, or the connection did
        self._owner: asyncio.Task[None] | None = None
        self._first_tools: asyncio.Future[list[types.Tool]] | None = None
        self._start_deadline = 0.0
        self._connecting: anyio.CancelScope | None = None
        self._num_connections = 0
        self._last_error = _NOT_STARTED
        self._refusal: CallFailedError | None = None

    @property
    def in_flight(self) -> int:
        """Calls that hold or wait for a slot."""
        return self._in_flight

    @property
    def is_connected(self) -> bool:
        """Whether a call would be sent at once."""
        return self._connection is not None

    @property
    def num_connections(self) -> int:
        """Connections made so far; above 1 the server was restarted or came back."""
        return self._num_connections

    @property
    def last_error(self) -> str:
        """Why the last connection ended or could not be made."""
        return self._last_error

    @property
    def refusal(self) -> CallFailedError | None:
        """Why the server lets nobody in at the moment (authorization, quota); None if it does, or cannot be reached."""
        return self._refusal

    async def start(self) -> list[types.Tool]:
        """Connect and list the tools, within the connect timeout. Raises ToolServerError."""
        loop = asyncio.get_running_loop()
        self._first_tools = loop.create_future()
        self._start_deadline = loop.time() + self._connect_timeout_s
        self._owner = asyncio.create_task(self._own(), name=f"mcp-session-{self._server.name}")
        return await asyncio.shield(self._first_tools)

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> types.CallToolResult:
        """One call; the caller sets the deadline by cancelling.

        Raises SessionLostError, SessionClosedError, or CallFailedError for an answer that is no result.
        """
        self._in_flight += 1
        try:
            async with self._slots:
                connection = await self._wait_connected()
                return await self._call_on(connection, tool, arguments)
        finally:
            self._in_flight -= 1

    def check_health(self) -> None:
        """Ask the server for a sign of life; if none comes, reconnect. To be called after a deadline passed."""
        self._health_check_wanted = True
        self._health_known.clear()
        self._changed.set()

    async def close(self) -> None:
        """End the connection, the server process and every call. Bounded; safe to repeat."""
        self._closing = True
        self._changed.set()
        self._ready.set()
        if self._owner is None:
            return
        if self._connecting is not None:
            self._connecting.cancel()
        await asyncio.wait({self._owner}, timeout=_CLOSE_TIMEOUT_S)
        if not self._owner.done():
            logger.warning("tool server %s did not close in %g s: cancelled", self._server.name, _CLOSE_TIMEOUT_S)
            self._owner.cancel()
            await asyncio.wait({self._owner}, timeout=_KILL_TIMEOUT_S)

    # --- calls ---

    async def _wait_connected(self) -> _Connection:
        while True:
            if self._closing:
                raise SessionClosedError(self._server.name)
            if self._connection is not None:
                return self._connection
            if self._refusal is not None:
                raise CallFailedError(str(self._refusal), status=self._refusal.status)
            await self._ready.wait()

    async def _call_on(self, connection: _Connection, tool: str, arguments: Mapping[str, Any]) -> types.CallToolResult:
        call = asyncio.create_task(connection.client.call_tool(tool, dict(arguments)))
        connection.calls.add(call)
        call.add_done_callback(connection.calls.discard)
        waited_for: set[asyncio.Future[Any]] = {call, connection.lost}
        try:
            await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not call.done():
                call.cancel()  # the SDK tells the server
                await asyncio.wait({call}, timeout=_CANCEL_GRACE_S)
        if not call.done() or call.cancelled():
            raise SessionClosedError(self._server.name) if self._closing else SessionLostError(self._last_error)
        error = call.exception()
        if error is None:
            return call.result()
        if _is_transport_failure(error) and self._connection is connection:
            # Only this request is known to be lost. A repeat makes sense once it is clear whether the session is, too.
            self.check_health()
            await self._health_known.wait()
        if self._closing:
            raise SessionClosedError(self._server.name) from error
        if connection.lost.done() or _is_transport_failure(error):
            raise SessionLostError(_describe(error)) from error
        raise failure_of_error(error) from error

    # --- the owner ---

    async def _own(self) -> None:
        pause_s = _FIRST_PAUSE_S
        loop = asyncio.get_running_loop()
        try:
            while not self._closing:
                began, connections_before = loop.time(), self._num_connections
                failure = await self._run_connection()
                if self._closing or not self._note_failure(failure):
                    return
                if self._num_connections > connections_before and loop.time() - began > _LONGEST_PAUSE_S:
                    pause_s = _FIRST_PAUSE_S
                await self._pause(pause_s * self._rng.uniform(0.5, 1.5))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        finally:
            self._closing = True
            self._ready.set()
            self._give_up(f"{self._title()} was closed while it started")

    async def _run_connection(self) -> BaseException | None:
        """One life of the connection, in a task of its own: a dying transport cancels that task, never this one."""
        notes = ConnectionNotes(self._server)
        life = asyncio.create_task(self._connect_and_serve(notes), name=f"mcp-connection-{self._server.name}")
        try:
            await asyncio.wait({life})
        finally:
            if not life.done():  # this task was cancelled: the connection still has a child process to end
                self._closing = True
                self._changed.set()
                if self._connecting is not None:
                    self._connecting.cancel()
                await asyncio.wait({life}, timeout=_KILL_TIMEOUT_S)
                life.cancel()
            self._disconnected()
        error = ConnectionError("the connection was lost") if life.cancelled() else life.exception()
        out_of_time = isinstance(error, TimeoutError) and self._num_connections == 0
        if not out_of_time or self._last_error == _NOT_STARTED:  # else: what failed before says more
            reason = notes.flood or ("the server closed the connection" if error is None else _describe(error))
            self._last_error = self._server.without_secrets(reason) + notes.describe()
        self._refusal = _refusal_of(error)
        if self._refusal is not None:
            self._ready.set()  # callers need not wait: they would be refused
        return error

    def _note_failure(self, failure: BaseException | None) -> bool:
        """Whether to connect again. A server that never started is given up, unless it may still be coming up."""
        if self._num_connections > 0:
            next_step = "connecting again" if self._reconnects else "its state is gone"
            logger.warning("%s was lost: %s; %s", self._title(), self._last_error, next_step)
            return self._reconnects
        cause = _root_cause(failure)
        if asyncio.get_running_loop().time() < self._start_deadline:
            if self._server.kind is not TransportKind.STDIO and isinstance(cause, httpx2.TransportError):
                return True  # nobody listens yet
            if self._kind is TransportKind.AUTO and isinstance(cause, MCPError) and self._refusal is None:
                logger.info("%s is no streamable-HTTP endpoint (%s): trying SSE", self._title(), self._last_error)
                self._kind = TransportKind.SSE
                return True
        self._give_up(f"{self._title()} did not start: {self._last_error}")
        return False

    def _give_up(self, message: str) -> None:
        if self._first_tools is not None and not self._first_tools.done():
            self._first_tools.set_exception(ToolServerError(message))
            self._first_tools.exception()  # read, so that an abandoned start logs nothing

    async def _connect_and_serve(self, notes: ConnectionNotes) -> None:
        lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def mark_lost() -> None:
            if not lost.done():
                lost.set_result(None)
                self._disconnected()
                self._changed.set()

        transport = open_transport(self._server, kind=self._kind, notes=notes, on_end=mark_lost)
        # An anyio scope, because the SDK shields the end of a child process from these, not from Task.cancel().
        with anyio.CancelScope(deadline=self._connect_deadline()) as scope:
            self._connecting = scope
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(Client(transport, cache=None, mode=self._protocol_mode()))
                tools = await _list_tools(client)
                scope.deadline = math.inf
                self._connecting = None
                stack.callback(mark_lost)  # before the client ends, which can take seconds: no call may start on it
                self._connected(_Connection(client=client, lost=lost, tools=tools))
                await self._serve(client, lost)
        self._connecting = None
        if scope.cancelled_caught and not self._closing:
            raise TimeoutError

    def _protocol_mode(self) -> Literal["auto", "legacy"]:
        """Since its 2026 revision the protocol has no sessions over HTTP: state per Record needs the one before."""
        return "legacy" if self._server.scope is SessionScope.PER_ROLLOUT else "auto"

    def _connect_deadline(self) -> float:
        if self._num_connections == 0:
            return self._start_deadline
        return asyncio.get_running_loop().time() + self._connect_timeout_s

    async def _serve(self, client: Client, lost: asyncio.Future[None]) -> None:
        health_check: asyncio.Task[None] | None = None
        try:
            while not self._closing and not lost.done():
                self._changed.clear()
                if self._health_check_wanted and health_check is None:
                    self._health_check_wanted = False
                    health_check = asyncio.create_task(self._check_health(client))
                    health_check.add_done_callback(self._note_health_check)
                await self._changed.wait()
                if health_check is not None and health_check.done():
                    health_check.result()
                    health_check = None
                    self._health_known.set()
        finally:
            if health_check is not None:
                health_check.cancel()
                await asyncio.wait({health_check}, timeout=_CANCEL_GRACE_S)

    def _note_health_check(self, health_check: asyncio.Task[None]) -> None:
        if not health_check.cancelled():
            health_check.exception()  # read, so that one nobody waits for any more logs nothing
        self._changed.set()

    async def _check_health(self, client: Client) -> None:
        """Raises if the server shows no sign of life; that ends the connection."""
        async with asyncio.timeout(self._connect_timeout_s):
            await client.list_tools()

    def _connected(self, connection: _Connection) -> None:
        self._num_connections += 1
        self._refusal = None
        self._connection = connection
        self._health_check_wanted = False
        self._ready.set()
        if self._first_tools is not None and not self._first_tools.done():
            self._first_tools.set_result(connection.tools)

    def _disconnected(self) -> None:
        self._connection = None
        self._health_known.set()
        if not self._closing:
            self._ready.clear()

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not self._closing:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return

    def _title(self) -> str:
        return f"tool server {self._server.name!r} ({self._server.description})"


async def _list_tools(client: Client) -> list[types.Tool]:
    tools: list[types.Tool] = []
    cursor: str | None = None
    for _ in range(_MAX_TOOL_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools.extend(page.tools)
        cursor = page.next_cursor
        if cursor is None:
            return tools
    raise ConnectionError(f"its tool list does not end after {_MAX_TOOL_PAGES} pages")


def _is_transport_failure(error: BaseException) -> bool:
    return isinstance(error, MCPError) and (
        error.code == types.CONNECTION_CLOSED or error.error.message in _HTTP_STAND_INS
    )


def _root_cause(error: BaseException | None) -> BaseException | None:
    """The first leaf of an exception group: what a task group of the SDK failed with."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _refusal_of(error: BaseException | None) -> CallFailedError | None:
    """What a failed connection says about access; None if it says nothing."""
    cause = _root_cause(error)
    if not isinstance(cause, MCPError | httpx2.HTTPStatusError):
        return None
    failed = failure_of_error(cause)
    return failed if failed.status in {ToolStatus.AUTH, ToolStatus.QUOTA} else None


def _describe(error: BaseException) -> str:
    cause = _root_cause(error)
    if isinstance(cause, TimeoutError):
        return "no answer within the connect timeout"
    if isinstance(cause, ValidationError):
        first = cause.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        return f"its reply is no {cause.title} ({where}: {first['msg']}; {cause.error_count()} problems in all)"
    return f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
