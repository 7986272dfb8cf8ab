"""The proxy with real sockets on loopback, between a client and an echo server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from agentrl.cli.chaos.proxy import Proxy

WITHIN_S = 10.0
MOMENT_S = 0.2
"""How long silence is listened to before it counts as silence."""

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while chunk := await reader.read(65_536):
            writer.write(chunk)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


@asynccontextmanager
async def proxied_echo() -> AsyncIterator[tuple[Proxy, int]]:
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    upstream = server.sockets[0].getsockname()[:2]
    proxy = Proxy(upstream=lambda: upstream)
    port = await proxy.start()
    try:
        yield proxy, port
    finally:
        await proxy.close()
        server.close()


async def connect(port: int) -> Connection:
    return await asyncio.open_connection("127.0.0.1", port)


async def exchange(connection: Connection, message: bytes) -> bytes:
    reader, writer = connection
    writer.write(message)
    await writer.drain()
    async with asyncio.timeout(WITHIN_S):
        return await reader.readexactly(len(message))


async def is_silent(reader: asyncio.StreamReader) -> bool:
    try:
        async with asyncio.timeout(MOMENT_S):
            await reader.readexactly(1)
    except TimeoutError:
        return True
    return False


async def test_a_healthy_proxy_carries_everything_in_order():
    async with proxied_echo() as (proxy, port):
        message = bytes(range(256)) * 4096
        connections = [await connect(port) for _ in range(3)]
        replies = await asyncio.gather(*(exchange(connection, message) for connection in connections))
        assert replies == [message] * 3
        assert proxy.num_connections == 3


async def test_a_slow_proxy_delays_both_directions_and_is_quick_again_once_healed():
    async with proxied_echo() as (proxy, port):
        connection = await connect(port)
        clock = asyncio.get_running_loop().time
        proxy.slow(latency_s=0.3)
        began = clock()
        assert await exchange(connection, b"late") == b"late"
        assert clock() - began >= 0.6
        proxy.heal()
        assert await exchange(connection, b"soon") == b"soon"


async def test_a_reset_cuts_every_open_connection_and_new_ones_work():
    async with proxied_echo() as (proxy, port):
        connections = [await connect(port) for _ in range(2)]
        for connection in connections:
            await exchange(connection, b"here")
        assert proxy.reset() == 2
        for reader, _ in connections:
            async with asyncio.timeout(WITHIN_S):
                with pytest.raises(ConnectionResetError):
                    await reader.readexactly(1)
        assert await exchange(await connect(port), b"again") == b"again"


async def test_a_swallowing_proxy_accepts_passes_nothing_and_delivers_what_it_held_once_healed():
    async with proxied_echo() as (proxy, port):
        old = await connect(port)
        await exchange(old, b"before")
        proxy.swallow()
        new = await connect(port)
        for reader, writer in (old, new):
            writer.write(b"held")
            await writer.drain()
            assert await is_silent(reader)
        proxy.heal()
        for reader, _ in (old, new):
            async with asyncio.timeout(WITHIN_S):
                assert await reader.readexactly(4) == b"held"


async def test_swallowed_connections_can_be_reset():
    async with proxied_echo() as (proxy, port):
        reader, writer = await connect(port)
        proxy.swallow()
        writer.write(b"x")
        await writer.drain()
        assert await is_silent(reader)
        proxy.reset()
        async with asyncio.timeout(WITHIN_S):
            with pytest.raises(ConnectionResetError):
                await reader.readexactly(1)


async def test_a_server_that_is_not_there_resets_the_client_and_is_found_where_it_comes_back():
    where = ("127.0.0.1", 1)
    proxy = Proxy(upstream=lambda: where)
    port = await proxy.start()
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    try:
        reader, _ = await connect(port)
        async with asyncio.timeout(WITHIN_S):
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
        where = server.sockets[0].getsockname()[:2]
        assert await exchange(await connect(port), b"there") == b"there"
    finally:
        await proxy.close()
        server.close()


async def test_a_closed_proxy_leaves_no_connection_open():
    async with proxied_echo() as (proxy, port):
        reader, _ = await connect(port)
        proxy.swallow()
        await proxy.close()
        async with asyncio.timeout(WITHIN_S):
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
        assert proxy.num_connections == 0
