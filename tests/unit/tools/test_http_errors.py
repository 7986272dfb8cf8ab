"""Replies over HTTP that never end, or hide how large they are."""

import asyncio
import gzip
from contextlib import asynccontextmanager, suppress

import httpx2
import pytest

from agentrl.tools.http_errors import MAX_REPLY_BYTES, PLAIN_BODIES, CallErrorTransport

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


@asynccontextmanager
async def answering(write):
    """The URL of a server that reads the head of a request and leaves the reply to `write(request, writer)`."""

    async def serve(reader, writer):
        with suppress(ConnectionError):
            await write(await reader.readuntil(b"\r\n\r\n"), writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"


async def post(url):
    async with httpx2.AsyncClient(transport=CallErrorTransport(), headers=PLAIN_BODIES, timeout=30) as client:
        return await client.post(url)


async def test_a_reply_without_end_ends_at_the_limit():
    sent = 0

    async def endless(request, writer):
        nonlocal sent
        writer.write(HEAD + b"\r\n")
        while True:
            writer.write(b" " * 2**20)
            await writer.drain()
            sent += 2**20

    async with answering(endless) as url:
        with pytest.raises(httpx2.ReadError, match="longer than"):
            await post(url)
    assert sent < 4 * MAX_REPLY_BYTES


async def test_a_compressed_reply_is_not_asked_for_and_not_unpacked():
    bomb = gzip.compress(b" " * 50_000_000)

    async def compressed(request, writer):
        assert b"accept-encoding: identity" in request.lower()
        writer.write(HEAD + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(bomb) + bomb)
        await writer.drain()

    async with answering(compressed) as url:
        assert (await post(url)).content == bomb
