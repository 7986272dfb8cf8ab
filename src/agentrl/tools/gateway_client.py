"""`GatewayServer`: the tools of AgentDock's `/mcpapi` gateway, many tool servers behind one plain HTTP API.

GET  {base}/servers                  {"servers": [id, ...]}
GET  {base}/server/{id}/tools        {"tools": [OpenAI function, ...]}
POST {base}/tool/{server}.{tool}     the arguments object; replies: gateway_replies.py
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlsplit

import httpx2

from agentrl.errors import ToolServerError
from agentrl.tools.failures import CallFailedError
from agentrl.tools.gateway_replies import read_call_reply
from agentrl.tools.guard import BreakerState, CallGuard
from agentrl.tools.http_errors import MAX_REPLY_BYTES, PLAIN_BODIES
from agentrl.tools.pool import ListedTool, all_or_first_error
from agentrl.tools.requests import shorten
from agentrl.tools.server_config import ServerConfig
from agentrl.types import ToolResult, ToolStatus

_CONNECT_TIMEOUT_S = 30.0
_START_POLL_S = 0.2
_CLOSE_TIMEOUT_S = 5.0
_NOT_FOUND = 404
_MAX_CONNECTIONS = 64
_KEEPALIVE_S = 2.0  # servers close idle connections after 5 s or more: a request must not meet with that


class GatewayServer:
    """Implements ToolServer over a gateway. It has no sessions: state, if any, is the gateway's and shared by all."""

    def __init__(self, config: ServerConfig, *, connect_timeout_s: float, rng: random.Random) -> None:
        self.config = config
        self._connect_timeout_s = config.connect_timeout_s or connect_timeout_s
        self._guard = CallGuard(config, rng=rng)
        self._slots = asyncio.Semaphore(config.max_in_flight * config.sessions)
        self._base = urlsplit(config.url)
        limits = httpx2.Limits(
            max_connections=_MAX_CONNECTIONS, max_keepalive_connections=_MAX_CONNECTIONS, keepalive_expiry=_KEEPALIVE_S
        )
        # Deadlines are the caller's, so that waiting for a connection counts.
        timeout = httpx2.Timeout(None, connect=_CONNECT_TIMEOUT_S)
        self._client = httpx2.AsyncClient(headers={**PLAIN_BODIES, **config.headers}, timeout=timeout, limits=limits)
        self._running: set[asyncio.Task[ToolResult]] = set()
        self._is_closed = False

    @property
    def breaker_state(self) -> BreakerState:
        """See ToolServer.breaker_state."""
        return self._guard.breaker_state

    async def start(self) -> list[ListedTool]:
        """List the tools of every server, or of the chosen one; waits for a gateway that is still coming up."""
        last = "no answer within the connect timeout"
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                while True:
                    try:
                        return await self._list_all()
                    except httpx2.TransportError as error:
                        last = f"{type(error).__name__}: {error}"
                    await asyncio.sleep(_START_POLL_S)
        except TimeoutError:
            raise ToolServerError(f"{self._title()} did not start: {last}") from None

    async def call(self, tool: str, arguments: Mapping[str, Any], *, deadline_s: float) -> ToolResult:
        """One call; the outcome is typed."""
        limit_s = min(deadline_s, self.config.timeout_s)

        async def send(deadline: float) -> ToolResult:
            return await self._send_until(deadline, tool=tool, arguments=arguments, limit_s=limit_s)

        return await self._guard.call(tool, send=send, deadline_s=deadline_s)

    def for_record(self) -> GatewayServer:
        """Itself: the protocol knows no sessions."""
        return self

    async def close(self) -> None:
        """End running calls and connections."""
        self._is_closed = True
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(set(self._running), timeout=_CLOSE_TIMEOUT_S)
        await self._client.aclose()

    # --- listing ---

    async def _list_all(self) -> list[ListedTool]:
        names = self._names(await self._get("servers"), key="servers")
        wanted = self.config.only_server
        if wanted is not None and wanted not in names:
            known = ", ".join(names) or "none"
            raise ToolServerError(f"{self._title()}: it has no server {wanted!r}; it has: {known}")
        chosen = names if wanted is None else [wanted]
        listed = await all_or_first_error(self._list_one(name) for name in chosen)
        return [tool for tools in listed for tool in tools]

    async def _list_one(self, server: str) -> list[ListedTool]:
        reply = await self._get(f"server/{quote(server, safe='')}/tools")
        if reply is None:
            return []
        tools = reply.get("tools") if isinstance(reply, dict) else None
        if not isinstance(tools, list):
            raise ToolServerError(f"{self._title()}: the reply for server {server!r} has no list `tools`")
        return [self._listed(tool, server=server) for tool in tools]

    def _listed(self, tool: Any, *, server: str) -> ListedTool:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not isinstance(function, dict):
            raise ToolServerError(f"{self._title()}: server {server!r} lists a tool without a name")
        bare = name.removeprefix(f"{server}.")
        parameters = function.get("parameters")
        return ListedTool(
            server=server,
            name=bare,
            remote_name=f"{server}.{bare}",
            description=str(function.get("description") or ""),
            parameters=parameters if isinstance(parameters, dict) else {"type": "object"},
        )

    def _names(self, reply: Any, *, key: str) -> list[str]:
        names = reply.get(key) if isinstance(reply, dict) else None
        if not isinstance(names, list):
            raise ToolServerError(f"{self._title()}: it is no gateway: its reply has no list `{key}`")
        return [str(name) for name in names]

    async def _get(self, path: str) -> Any:
        """The JSON at a path; None if there is nothing. Raises ToolServerError, or TransportError if unreachable."""
        status, _, body = await self._request("GET", path, content=None)
        if status == _NOT_FOUND and path != "servers":
            return None
        if status >= 400:
            raise ToolServerError(f"{self._title()} did not start: HTTP {status} for /{path}")
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ToolServerError(f"{self._title()}: no JSON at /{path} ({error})") from error

    # --- calls ---

    async def _send_until(
        self, deadline: float, *, tool: str, arguments: Mapping[str, Any], limit_s: float
    ) -> ToolResult:
        if self._is_closed:
            raise CallFailedError(f"{tool} was cancelled: the tools were closed", status=ToolStatus.CANCELLED)
        call = asyncio.create_task(self._send(tool, arguments))
        self._running.add(call)
        call.add_done_callback(self._running.discard)
        try:
            loop = asyncio.get_running_loop()
            await asyncio.wait({call}, timeout=max(0.0, deadline - loop.time()))
        finally:
            is_late = not call.done()
            if is_late:
                call.cancel()
                await asyncio.wait({call}, timeout=_CLOSE_TIMEOUT_S)
        if is_late:
            raise CallFailedError(f"{tool} did not answer within {limit_s:g} s", status=ToolStatus.TIMEOUT)
        if call.cancelled():
            raise CallFailedError(f"{tool} was cancelled: the tools were closed", status=ToolStatus.CANCELLED)
        return call.result()

    async def _send(self, tool: str, arguments: Mapping[str, Any]) -> ToolResult:
        async with self._slots:
            try:
                content = json.dumps(dict(arguments), ensure_ascii=True).encode("ascii")
                status, headers, body = await self._request("POST", f"tool/{quote(tool, safe='')}", content=content)
            except httpx2.ConnectError as error:
                raise CallFailedError(
                    f"{tool} is not available: {error}", status=ToolStatus.CRASHED, was_refused=True
                ) from error
            except httpx2.TransportError as error:
                raise CallFailedError(f"{tool} crashed: {type(error).__name__}", status=ToolStatus.CRASHED) from error
        retry_after = headers.get("retry-after")
        try:
            return read_call_reply(json.loads(body), http_status=status, retry_after=retry_after)
        except (ValueError, RecursionError):  # no JSON, or none that anybody nests so deep
            text = {"detail": shorten(body.decode("utf-8", "replace"), limit=300)}
            return read_call_reply(text, http_status=status, retry_after=retry_after)

    async def _request(self, method: str, path: str, *, content: bytes | None) -> tuple[int, httpx2.Headers, bytes]:
        url = self._base._replace(path=f"{self._base.path.rstrip('/')}/{path}").geturl()
        headers = {"content-type": "application/json"} if content is not None else {}
        async with self._client.stream(method, url, content=content, headers=headers) as response:
            body = bytearray()
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > MAX_REPLY_BYTES:
                    raise CallFailedError(
                        f"the reply is longer than {MAX_REPLY_BYTES} bytes", status=ToolStatus.TOOL_ERROR
                    )
            return response.status_code, response.headers, bytes(body)

    def _title(self) -> str:
        return f"tool gateway {self.config.name!r} ({self.config.description})"
