"""The gateway in this process, over plain functions, with limits short enough to meet."""

import asyncio
import contextlib
from dataclasses import replace

import httpx2
import pytest

from agentrl.tools import FunctionToolbox
from agentrl.tools.gateway.calls import GatewayLimits
from agentrl.tools.gateway.serving import serve_gateway
from agentrl.tools.servers.serving import listen

LIMITS = GatewayLimits(
    max_in_flight=1, max_waiting=1, call_timeout_s=0.5, head_timeout_s=0.2, body_timeout_s=0.3, max_body_bytes=1000
)


async def hang() -> str:
    """Never answer."""
    await asyncio.Event().wait()
    return ""


async def echo(text: str) -> str:
    """Repeat."""
    return text


@contextlib.asynccontextmanager
async def gateway(**changes):
    ready = asyncio.get_running_loop().create_future()
    with listen("127.0.0.1", 0) as listener:
        toolbox = FunctionToolbox([hang, echo])
        serving = asyncio.create_task(
            serve_gateway(toolbox, listener, token=None, limits=replace(LIMITS, **changes), on_ready=ready.set_result)
        )
        try:
            async with httpx2.AsyncClient(base_url=await ready, timeout=10) as http:
                yield http
        finally:
            serving.cancel()
            await asyncio.wait({serving}, timeout=10)
        assert serving.done()


async def raw(http, content, *, wait_s=5):
    """What the server says on a connection that sends `content` and then nothing."""
    reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
    try:
        writer.write(content)
        return await asyncio.wait_for(reader.read(), wait_s)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize("content", [b"", b"GET /health HTTP/1.1\r\nHost: ", b"GET /health HTTP/1.1\r\nX: y\r\n"])
async def test_a_connection_without_a_whole_request_head_is_closed(content):
    async with gateway() as http:
        assert await raw(http, content) == b""


async def test_a_kept_connection_that_begins_a_second_request_and_stops_is_closed():
    async with gateway() as http:
        reply = await raw(http, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea")
    assert reply.startswith(b"HTTP/1.1 200 OK")


async def test_a_request_whose_body_does_not_come_is_refused():
    head = b"POST /mcpapi/tool/echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{"
    async with gateway() as http:
        assert (await raw(http, head)).startswith(b"HTTP/1.1 408 ")
        assert 'refused_total{reason="slow"} 1' in (await http.get("/metrics")).text


@pytest.mark.parametrize(
    "content", [b"\0" * 500, b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01" * 50, b"GET /" + b"a" * 200_000]
)
async def test_what_is_no_http_is_turned_away(content):
    async with gateway() as http:
        assert b"200 OK" not in await raw(http, content)
        assert (await http.get("/health")).json()["status"] == "ok"


async def test_beyond_the_slots_one_waits_and_the_rest_is_turned_away_at_once():
    async with gateway() as http:
        replies = await asyncio.gather(*(http.post("/mcpapi/tool/hang", json={}) for _ in range(4)))
        statuses = sorted(reply.status_code for reply in replies)
        busy = next(reply for reply in replies if reply.status_code == 429)
    assert statuses[2:] == [429, 429] or statuses[:2] == [424, 424]
    assert statuses.count(429) == 2
    assert busy.headers["retry-after"] == "1"
    assert busy.json()["agentrl_status"] == "rate_limited"


async def test_a_call_beyond_the_time_limit_frees_its_slot():
    async with gateway() as http:
        late = await http.post("/mcpapi/tool/hang", json={})
        after = await http.post("/mcpapi/tool/echo", json={"text": "x"})
    assert "0.5 s" in late.json()["detail"] or "did not" in late.json()["detail"]
    assert after.json() == {"content": "x"}


async def test_it_ends_while_a_call_runs_and_a_client_reads_nothing():
    async with gateway(call_timeout_s=60.0) as http:
        call = asyncio.create_task(http.post("/mcpapi/tool/hang", json={}))
        while "in_flight 1" not in (await http.get("/metrics")).text:
            await asyncio.sleep(0.01)
    with contextlib.suppress(httpx2.HTTPError):
        await call
