"""A TCP proxy in front of the database that can be slow, cut its connections, or swallow everything for a while.

process ──► proxy ──► database         healthy: bytes pass as they come
              │
              ├── slow(latency_s)      each piece of traffic waits that long, in both directions
              ├── reset()              every open connection ends with a TCP reset
              └── swallow()            connections are accepted, nothing passes until heal()
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from contextlib import suppress

CHUNK_BYTES = 65_536
CONNECT_TIMEOUT_S = 10.0
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Proxy:
    """Forwards loopback connections to wherever `upstream` says the server listens at that moment.

    Belongs to one event loop. Nothing is lost by being slow or swallowed: it passes later, in order.
    """

    def __init__(self, *, upstream: Callable[[], tuple[str, int]]) -> None:
        self._upstream = upstream
        self._latency_s = 0.0
        self._passing = asyncio.Event()
        self._passing.set()
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = {}

    async def start(self) -> int:
        """Listen on a free port of loopback; the port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        """Stop listening and cut what is open."""
        if self._server is not None:
            self._server.close()
        self.reset()
        connections = list(self._connections)
        for connection in connections:
            connection.cancel()
        if connections:
            await asyncio.wait(connections, timeout=CONNECT_TIMEOUT_S)

    @property
    def num_connections(self) -> int:
        """Open connections of clients."""
        return len(self._connections)

    def slow(self, *, latency_s: float) -> None:
        """From now on, delay each piece of traffic."""
        self._latency_s = latency_s

    def swallow(self) -> None:
        """From now on, let nothing pass."""
        self._passing.clear()

    def heal(self) -> None:
        """From now on, be a good connection; what was held back goes on its way."""
        self._latency_s = 0.0
        self._passing.set()

    def reset(self) -> int:
        """Cut every open connection with a TCP reset to both sides; how many clients that hit."""
        for writers in self._connections.values():
            for writer in writers:
                _cut(writer)
        return len(self._connections)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.current_task()
        assert connection is not None
        writers = self._connections[connection] = [writer]
        try:
            await self._passing.wait()
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                upstream_reader, upstream_writer = await asyncio.open_connection(*self._upstream())
            writers.append(upstream_writer)
            await self._join((reader, upstream_writer), (upstream_reader, writer))
        except (OSError, TimeoutError):  # the server is not there: the client finds out by the reset
            pass
        finally:
            del self._connections[connection]
            for one in writers:
                _cut(one)

    async def _join(self, *ways: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        """Carry bytes both ways until either side ends."""
        carriers = [asyncio.create_task(self._carry(reader, writer)) for reader, writer in ways]
        try:
            await asyncio.wait(carriers, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for carrier in carriers:
                carrier.cancel()
            await asyncio.wait(carriers)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while chunk := await reader.read(CHUNK_BYTES):
                await self._passing.wait()
                if self._latency_s:
                    await asyncio.sleep(self._latency_s)
                writer.write(chunk)
                await writer.drain()


def _cut(writer: asyncio.StreamWriter) -> None:
    """Close at once; the peer gets a reset instead of an orderly end."""
    connection = writer.get_extra_info("socket")
    if writer.transport.is_closing() or connection is None:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    writer.transport.abort()
