"""Opens the byte streams to one MCP server, and remembers what a later error message needs.

`open_transport` adds to the SDK's transports: the moment the server's stream ends is reported (`on_end`), the last
lines of a stdio server's stderr are kept, lines on stdout that are no MCP are remembered, and HTTP limits are set.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, cast

import anyio
import httpx2
from mcp.client.sse import sse_client
from mcp.client.stdio import StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from agentrl.config.marks import LAUNCH_MARK
from agentrl.tools.http_errors import MAX_REPLY_BYTES, PLAIN_BODIES, CallErrorTransport
from agentrl.tools.requests import shorten
from agentrl.tools.server_config import ServerConfig, TransportKind
from agentrl.tools.stdio import open_stdio

logger = logging.getLogger(__name__)

_MAX_CONNECTIONS = 64  # more parallel connections made one reset end the whole SDK session
_KEEPALIVE_S = 2.0  # servers close idle connections after 5 s or more: a request must not meet with that
_CONNECT_TIMEOUT_S = 30.0
_STDERR_LINES = 20
_STDERR_LINE_CHARS = 500
_STDERR_EOF_WAIT_S = 0.5

Streams = tuple[Any, Any]


class StderrTail(asyncio.Protocol):
    """Keeps the last lines a child process wrote to stderr, and passes each on to the debug log."""

    def __init__(self, server: ServerConfig) -> None:
        self._server = server
        self._partial = b""
        self._lines: deque[str] = deque(maxlen=_STDERR_LINES)
        self._ended = asyncio.Event()

    @property
    def lines(self) -> list[str]:
        """Last lines, oldest first."""
        last = self._server.without_secrets(self._partial.decode("utf-8", "replace"))
        return [*self._lines, last] if last.strip() else list(self._lines)

    def data_received(self, data: bytes) -> None:
        """Split what arrived into lines."""
        *complete, partial = (self._partial + data).split(b"\n")
        self._partial = partial[-_STDERR_LINE_CHARS:]
        for line in complete:
            said = self._server.without_secrets(line.decode("utf-8", "replace").rstrip())
            text = shorten(said, limit=_STDERR_LINE_CHARS)
            if text:
                self._lines.append(text)
                logger.debug("tool server %s: %s", self._server.name, text)

    def connection_lost(self, _error: Exception | None) -> None:
        """The child, and whatever inherited its stderr, closed it."""
        self._ended.set()

    async def wait_end(self) -> None:
        """Give a dying process a moment to hand over its last words."""
        try:
            await asyncio.wait_for(self._ended.wait(), _STDERR_EOF_WAIT_S)
        except TimeoutError:
            logger.debug("tool server %s: something still holds its stderr", self._server.name)


class ConnectionNotes:
    """What went past on one connection, for error messages."""

    def __init__(self, server: ServerConfig) -> None:
        self.server = server
        self.stderr = StderrTail(server)
        self.garbage: str | None = None
        self.flood: str | None = None

    def note_flood(self, reason: str) -> None:
        """Keep why the server was ended."""
        self.flood = reason

    def describe(self) -> str:
        """The notes as the end of an error message; empty if there are none."""
        text = ""
        if self.garbage is not None:
            text += f"\n  it wrote to stdout what is no MCP message: {self.garbage}"
        if self.stderr.lines:
            text += "\n  last lines of its stderr:\n    " + "\n    ".join(self.stderr.lines)
        return text


@asynccontextmanager
async def open_transport(
    server: ServerConfig, *, kind: TransportKind, notes: ConnectionNotes, on_end: Callable[[], None]
) -> AsyncIterator[Streams]:
    """Streams to `server`; `on_end` is called once nothing more can arrive. Leaves no process or socket behind."""
    transport: AbstractAsyncContextManager[Streams]
    if kind is TransportKind.STDIO:
        transport = _open_stdio(server, notes)
    elif kind is TransportKind.SSE:
        transport = _open_sse(server)
    else:
        transport = _open_http(server)
    async with transport as (read_stream, write_stream):
        yield _WatchedStream(read_stream, notes=notes, on_end=on_end), write_stream


@asynccontextmanager
async def _open_stdio(server: ServerConfig, notes: ConnectionNotes) -> AsyncIterator[Streams]:
    mark = {name: value for name, value in os.environ.items() if name == LAUNCH_MARK}  # the SDK hands on little else
    parameters = StdioServerParameters(
        command=server.command,
        args=list(server.args),
        env={**server.env, **mark},
        cwd=server.cwd,
    )
    read_fd, write_fd = os.pipe()
    with os.fdopen(read_fd, "rb", 0) as reader, os.fdopen(write_fd, "w") as errlog:
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: notes.stderr, reader)
        try:
            async with open_stdio(parameters, name=server.name, errlog=errlog, on_flood=notes.note_flood) as streams:
                errlog.close()  # the child has its own copy; ours would hide its end
                yield streams
        finally:
            with anyio.CancelScope(shield=True):
                await notes.stderr.wait_end()
            pipe.close()


@asynccontextmanager
async def _open_http(server: ServerConfig) -> AsyncIterator[Streams]:
    timeout = httpx2.Timeout(_CONNECT_TIMEOUT_S, read=server.timeout_s + _CONNECT_TIMEOUT_S)
    limits = httpx2.Limits(
        max_connections=_MAX_CONNECTIONS,
        max_keepalive_connections=_MAX_CONNECTIONS,
        keepalive_expiry=_KEEPALIVE_S,
    )
    async with (
        httpx2.AsyncClient(
            headers={**PLAIN_BODIES, **server.headers}, timeout=timeout, transport=CallErrorTransport(limits=limits)
        ) as client,
        streamable_http_client(server.url, http_client=client, max_sse_event_size=MAX_REPLY_BYTES) as streams,
    ):
        yield streams


def _open_sse(server: ServerConfig) -> AbstractAsyncContextManager[Streams]:
    # The SDK declares no return type for it.
    return cast(
        "AbstractAsyncContextManager[Streams]",
        sse_client(server.url, headers={**PLAIN_BODIES, **server.headers}, timeout=_CONNECT_TIMEOUT_S),
    )


class _WatchedStream:
    """The SDK's read stream, with its end and its unparsable items noted."""

    def __init__(self, inner: Any, *, notes: ConnectionNotes, on_end: Callable[[], None]) -> None:
        self._inner = inner
        self._notes = notes
        self._on_end = on_end

    @property
    def last_context(self) -> Any:
        """Context of the sender, where the SDK's stream has one: the dispatcher asks for it by name."""
        return getattr(self._inner, "last_context", None)

    async def receive(self) -> Any:
        """Next message."""
        try:
            return self._note(await self._inner.receive())
        except (anyio.EndOfStream, anyio.ClosedResourceError):
            self._on_end()
            raise

    async def aclose(self) -> None:
        """Close the inner stream."""
        await self._inner.aclose()

    def __aiter__(self) -> _WatchedStream:
        return self

    async def __anext__(self) -> Any:
        try:
            return self._note(await self._inner.__anext__())
        except (StopAsyncIteration, anyio.ClosedResourceError):
            self._on_end()
            raise

    async def __aenter__(self) -> _WatchedStream:
        await self._inner.__aenter__()
        return self

    async def __aexit__(self, *exc_info: Any) -> Any:
        return await self._inner.__aexit__(*exc_info)

    def _note(self, item: Any) -> Any:
        if isinstance(item, Exception):
            said = self._notes.server.without_secrets(" ".join(str(item).split()))
            self._notes.garbage = shorten(said, limit=_STDERR_LINE_CHARS)
        return item
