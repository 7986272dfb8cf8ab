"""Runs a tool server as a child process and speaks MCP over its stdin and stdout, in bounded memory.

The SDK's own transport keeps a line of any length and hands on any number of messages nobody asked for. Here a server
that writes a line longer than `MAX_LINE_BYTES`, or `MAX_UNASKED_BYTES` since the last request or answer, is ended. The
order of a shutdown is that of the MCP specification: close stdin, wait, SIGTERM, SIGKILL; a flooding server gets no
time to end by itself. Every wait is bounded.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any, TextIO

import anyio
import mcp_types as types
from anyio.abc import Process
from mcp.client.stdio import StdioServerParameters, get_default_environment
from mcp.os.posix.utilities import terminate_posix_process_tree
from mcp.shared.message import SessionMessage

from agentrl.tools.requests import shorten

logger = logging.getLogger(__name__)

MAX_LINE_BYTES = 16 * 1024 * 1024
MAX_UNASKED_BYTES = 4 * 1024 * 1024
_FLUSH_TIMEOUT_S = 0.5
_EXIT_TIMEOUT_S = 2.0
_TERMINATE_TIMEOUT_S = 2.0
_EXIT_POLL_S = 0.01
_TRACED_CHARS = 500
_CLOSED = (anyio.ClosedResourceError, anyio.BrokenResourceError, OSError)


class FloodError(Exception):
    """A server writes more than anybody asked for."""


class LineReader:
    """Cuts the output of a server into lines. Holds at most `MAX_LINE_BYTES` and one chunk."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._num_bytes = 0

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The lines that `chunk` completes. Raises FloodError for one that does not end."""
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            self._keep(end)
            yield b"".join(self._pieces)
            self._pieces, self._num_bytes = [], 0
        self._keep(rest)

    def _keep(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._num_bytes += len(piece)
        if self._num_bytes > MAX_LINE_BYTES:
            raise FloodError(f"it wrote a line of more than {MAX_LINE_BYTES} bytes and was ended")


@asynccontextmanager
async def open_stdio(
    parameters: StdioServerParameters, *, name: str, errlog: TextIO, on_flood: Callable[[str], None]
) -> AsyncIterator[tuple[Any, Any]]:
    """The streams of a session with a new child process, as the SDK's client takes them. Leaves no process behind.

    `name` stands in the debug log; `on_flood` gets the reason why a server was ended.

    Raises OSError if the process cannot be started.
    """
    process = await anyio.open_process(
        [parameters.command, *parameters.args],
        env=get_default_environment() | (parameters.env or {}),
        stderr=errlog,
        cwd=parameters.cwd,
        start_new_session=True,
    )
    pipes = _Pipes(process, name=name, on_flood=on_flood)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pipes.read)
        tasks.start_soon(pipes.write)
        try:
            yield pipes.incoming, pipes.outgoing
        finally:
            with anyio.CancelScope(shield=True):
                await pipes.close()
            tasks.cancel_scope.cancel()


class _Pipes:
    """Both directions of one child process."""

    def __init__(self, process: Process, *, name: str, on_flood: Callable[[str], None]) -> None:
        self._process = process
        self._name = name
        self._on_flood = on_flood
        self._received, self.incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        self.outgoing, self._to_send = anyio.create_memory_object_stream[SessionMessage](0)
        self._flushed = anyio.Event()
        self._num_unasked_bytes = 0
        self._is_flooding = False

    async def read(self) -> None:
        """Hand on messages until the server, or the session, is gone; each is read when the last has been taken."""
        assert self._process.stdout is not None
        lines = LineReader()
        with suppress(*_CLOSED):
            async with self._received:
                try:
                    async for chunk in self._process.stdout:
                        for line in lines.feed(chunk):
                            await self._received.send(self._parse(line))
                except FloodError as error:
                    self._is_flooding = True
                    self._on_flood(str(error))
                    return
        await self._drain()

    async def write(self) -> None:
        """Send messages until the session has no more."""
        assert self._process.stdin is not None
        try:
            async with self._to_send:
                async for message in self._to_send:
                    self._num_unasked_bytes = 0
                    text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                    self._trace("->", text)
                    await self._process.stdin.send(f"{text}\n".encode("utf-8", "replace"))
        except _CLOSED:
            # The server may still live: without this the session would wait for its answer for ever.
            await self._received.aclose()
        finally:
            self._flushed.set()

    async def close(self) -> None:
        """End the process, and with it both tasks."""
        self.incoming.close()
        self.outgoing.close()
        if not self._is_flooding:
            with anyio.move_on_after(_FLUSH_TIMEOUT_S):
                await self._flushed.wait()
        await _end(self._process, has_time=not self._is_flooding)
        for stream in (self._received, self._to_send):
            stream.close()

    def _parse(self, line: bytes) -> SessionMessage | Exception:
        text = line.decode("utf-8", "replace")  # one bad byte must not end the session with all its calls
        self._trace("<-", text)
        try:
            message = types.jsonrpc_message_adapter.validate_json(text, by_name=False)
        except ValueError as error:
            self._count_unasked(len(line))
            return error
        if isinstance(message, types.JSONRPCResponse | types.JSONRPCError):
            self._num_unasked_bytes = 0
        else:
            self._count_unasked(len(line))
        return SessionMessage(message)

    def _trace(self, direction: str, text: str) -> None:
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s %s %s", self._name, direction, shorten(text, limit=_TRACED_CHARS))

    def _count_unasked(self, num_bytes: int) -> None:
        self._num_unasked_bytes += num_bytes
        if self._num_unasked_bytes > MAX_UNASKED_BYTES:
            raise FloodError(f"it wrote more than {MAX_UNASKED_BYTES} bytes that answer no request and was ended")

    async def _drain(self) -> None:
        """Let a server that ends write its last words: else it would wait for a reader and not end."""
        assert self._process.stdout is not None
        with anyio.CancelScope(shield=True), suppress(*_CLOSED):
            async for _ in self._process.stdout:
                pass


async def _end(process: Process, *, has_time: bool) -> None:
    """Close stdin, wait, SIGTERM to the process group, SIGKILL; without time SIGKILL follows at once."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(*_CLOSED):
        await process.stdin.aclose()
    if not (has_time and await _has_exited(process, within_s=_EXIT_TIMEOUT_S)):
        await terminate_posix_process_tree(process, _TERMINATE_TIMEOUT_S if has_time else 0.0)
        await _has_exited(process, within_s=_EXIT_TIMEOUT_S)
    with suppress(*_CLOSED):
        await process.stdout.aclose()
    # A descendant that has our pipes may still live: nothing public closes the transport without waiting for it.
    transport = getattr(getattr(process, "_process", None), "_transport", None)
    if transport is not None:
        transport.close()


async def _has_exited(process: Process, *, within_s: float) -> bool:
    """Whether the process ends in time. By polling: `wait` would wait for whatever inherited its pipes, too."""
    with anyio.move_on_after(within_s):
        while process.returncode is None:  # noqa: ASYNC110  # a process has no event for it
            await anyio.sleep(_EXIT_POLL_S)
    return process.returncode is not None
