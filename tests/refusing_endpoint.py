"""A streamable-HTTP MCP endpoint on loopback that refuses calls with an HTTP status."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web


@dataclass
class RefusingEndpoint:
    """Tool calls at /STATUS/mcp are answered with that HTTP status; `num_refusals` of them, then with a result.

    Status 0 breaks the connection. Nothing is answered before `num_together` calls have come.
    """

    num_refusals: float = float("inf")
    headers: dict[str, str] = field(default_factory=dict)
    authorizations: list[str | None] = field(default_factory=list)
    num_together: int = 1
    is_locked: bool = False  # then every message is answered with 401
    locks_when_broken: bool = False
    num_calls: int = 0
    num_sessions: int = 0
    url: str = ""
    all_here: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, request: web.Request) -> web.Response:
        """One JSON-RPC message."""
        message = await request.json()
        self.authorizations.append(request.headers.get("authorization"))
        if self.is_locked:
            return web.Response(status=401)
        if "id" not in message:
            return web.Response(status=202)
        if message["method"] == "initialize":
            self.num_sessions += 1
            return self._reply(message, {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
                                         "serverInfo": {"name": "refusing", "version": "1"}})  # fmt: skip
        if message["method"] == "tools/list":
            return self._reply(message, {"tools": [{"name": "work", "inputSchema": {"type": "object"}}]})
        if message["method"] != "tools/call":
            error = {"code": -32601, "message": "Method not found"}
            return web.json_response({"jsonrpc": "2.0", "id": message["id"], "error": error})
        self.num_calls += 1
        is_refused = self.num_calls <= self.num_refusals
        if self.num_calls >= self.num_together:
            self.all_here.set()
        await self.all_here.wait()
        if not is_refused:
            return self._reply(message, {"content": [{"type": "text", "text": "done"}]})
        status = int(request.match_info["status"])
        if status == 0:
            self.is_locked = self.locks_when_broken
            request.transport.abort()
        return web.Response(status=status or 500, headers=self.headers, text="<h1>No</h1>")

    def _reply(self, message: dict[str, object], result: dict[str, object]) -> web.Response:
        return web.json_response({"jsonrpc": "2.0", "id": message["id"], "result": result})


@asynccontextmanager
async def refusing_endpoint(**settings: object) -> AsyncIterator[RefusingEndpoint]:
    """Served until the block ends."""
    endpoint = RefusingEndpoint(**settings)
    app = web.Application()
    app.router.add_post("/{status}/mcp", endpoint.answer)
    async with served(app) as endpoint.url:
        yield endpoint


@asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[str]:
    """The base URL of an application on a free port of loopback."""
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = site._server.sockets[0].getsockname()[:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()
