"""A local OpenAI-compatible server that behaves as told: `async with chat_server(behave) as server`.

`behave` gets the parsed request (with "attempt", from 0, and "key") and returns a reply text, or one of the faults.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

HANG, MALFORMED, TRUNCATED, SLOW_DRIP, EMPTY, DROP = "hang", "malformed", "truncated", "drip", "empty", "drop"
COMPRESSED = "compressed"


@dataclass(frozen=True)
class Status:
    code: int
    text: str = "no"


@dataclass(frozen=True)
class Fault:
    name: str


@dataclass(frozen=True)
class Usage:
    """A reply whose request had `prompt_tokens`, says the server."""

    text: str
    prompt_tokens: Any


Behaviour = Callable[[dict[str, Any]], str | Status | Fault | Usage]


@dataclass
class ChatServer:
    behave: Behaviour
    requests: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        body["attempt"] = len(self.requests)
        body["key"] = request.headers.get("Authorization", "").removeprefix("Bearer ")
        body["encoding"] = request.headers.get("Accept-Encoding")
        self.requests.append(body)
        result = self.behave(body)
        if isinstance(result, Status):
            return web.Response(status=result.code, text=result.text)
        if isinstance(result, Fault):
            return await self.misbehave(request, result)
        text = result.text if isinstance(result, Usage) else result
        reply = completion(text, model=body["model"])
        if isinstance(result, Usage):
            reply["usage"]["prompt_tokens"] = result.prompt_tokens
        return web.json_response(reply)

    async def misbehave(self, request: web.Request, fault: Fault) -> web.StreamResponse:
        whole = json.dumps(completion("CORRECT", model="m")).encode()
        match fault.name:
            case "hang":
                await self.stopping.wait()
                return web.Response(status=503)
            case "malformed":
                return web.Response(body=b"{not json", content_type="application/json")
            case "compressed":
                headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
                return web.Response(body=gzip.compress(whole + b" " * 10**7), headers=headers)
            case "empty":
                return web.json_response(completion("", model="m"))
            case "truncated":
                response = web.StreamResponse(headers={"Content-Length": str(len(whole))})
                await response.prepare(request)
                await response.write(whole[: len(whole) // 2])
                assert request.transport is not None
                request.transport.close()
                return response
            case "drip":
                response = web.StreamResponse()
                await response.prepare(request)
                while not self.stopping.is_set():
                    await response.write(b" ")
                    await asyncio.sleep(0.02)
                return response
            case _:
                assert request.transport is not None
                request.transport.close()
                return web.Response()


def completion(text: str, *, model: str) -> dict[str, Any]:
    return {
        "object": "chat.completion",
        "model": model,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14},
    }


@asynccontextmanager
async def chat_server(behave: Behaviour) -> AsyncIterator[ChatServer]:
    server = ChatServer(behave=behave)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    server.url = f"http://127.0.0.1:{port}/v1"
    try:
        yield server
    finally:
        server.stopping.set()
        await runner.cleanup()
