"""`McpToolbox`: the tools of all configured MCP servers behind one Toolbox; `open_toolbox` starts it.

A call is checked against the tool's schema, sent to the least busy session of its server and bounded by a deadline.
If the session dies, the call of a stateless server is sent again (at most twice, within the same deadline); a call
that may have had an effect is not, and comes back as `crashed`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import mcp_types as types

from agentrl.config import ToolsConfig
from agentrl.tools.config_file import ServerConfig, load_server_configs
from agentrl.tools.requests import ArgumentCheck, cut, failure, refuse
from agentrl.tools.results import result_text
from agentrl.tools.session import CallFailedError, McpSession, SessionClosedError, SessionLostError
from agentrl.types import Recovery, ToolRequest, ToolResult, ToolSpec, ToolStatus

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_RETRIES = 2


async def open_toolbox(config: ToolsConfig) -> McpToolbox:
    """Start every configured server. Raises ConfigError, or ToolServerError after ending those that did start."""
    servers = load_server_configs(config)
    if not servers:
        logger.warning("no tool server is configured (mcp_config, mcp_manager_url): the model gets no tools")
    return await McpToolbox.open(
        servers,
        connect_timeout_s=config.tool_connect_timeout_s,
        max_result_chars=config.max_tool_result_chars,
        rng=random.Random(),
    )


class McpToolbox:
    """Implements protocols.Toolbox over MCP servers. Use it in the event loop that opened it."""

    def __init__(self, pools: Sequence[_ServerPool], tools: Sequence[_McpTool], *, max_result_chars: int) -> None:
        self._pools = tuple(pools)
        self._tools = {tool.spec.name: tool for tool in tools}
        self._max_result_chars = max_result_chars
        self._is_closed = False

    @classmethod
    async def open(
        cls, servers: Sequence[ServerConfig], *, connect_timeout_s: float, max_result_chars: int, rng: random.Random
    ) -> McpToolbox:
        """Connect to all servers at the same time. Raises ToolServerError naming the first that fails."""
        pools = [_ServerPool(server, connect_timeout_s=connect_timeout_s, rng=rng) for server in servers]
        try:
            listed = await _all_or_first_error(pool.start() for pool in pools)
            return cls(pools, _name_tools(list(zip(pools, listed, strict=True))), max_result_chars=max_result_chars)
        except BaseException:
            await _close_all(pools)
            raise

    def list_tools(self) -> Sequence[ToolSpec]:
        """All tools, in the order of the configuration. Fixed after start."""
        return tuple(tool.spec for tool in self._tools.values())

    async def call(self, request: ToolRequest, *, deadline_s: float) -> ToolResult:
        """One call within `deadline_s` and the server's own `timeout_s`; the outcome is typed, never raised."""
        refusal = refuse(request, self._tools)
        if refusal is not None:
            return refusal
        if self._is_closed:
            return failure(ToolStatus.CANCELLED, "the tools were closed")
        tool = self._tools[request.name]
        result = await tool.pool.call(tool.remote_name, request.arguments, deadline_s=deadline_s)
        return ToolResult(
            status=result.status,
            content=cut(result.content, max_chars=self._max_result_chars),
            error=result.error,
        )

    async def close(self) -> None:
        """End every child process, connection and running call. Safe to repeat."""
        self._is_closed = True
        await _close_all(self._pools)


@dataclass(frozen=True, slots=True, kw_only=True)
class _McpTool:
    spec: ToolSpec
    check: ArgumentCheck
    pool: _ServerPool
    remote_name: str


class _ServerPool:
    """The sessions of one server."""

    def __init__(self, server: ServerConfig, *, connect_timeout_s: float, rng: random.Random) -> None:
        self.server = server
        self._sessions = [
            McpSession(server, connect_timeout_s=connect_timeout_s, rng=rng) for _ in range(server.sessions)
        ]

    async def start(self) -> list[types.Tool]:
        """Connect every session; the tools of the first. Raises ToolServerError."""
        listed = await _all_or_first_error(session.start() for session in self._sessions)
        return listed[0]

    async def call(self, tool: str, arguments: Mapping[str, Any], *, deadline_s: float) -> ToolResult:
        """The call, sent again if its session dies and the server is stateless."""
        loop = asyncio.get_running_loop()
        limit_s = min(deadline_s, self.server.timeout_s)
        deadline = loop.time() + limit_s
        reason = ""
        is_repeatable = self.server.recovery is Recovery.STATELESS
        for _ in range(1 + (MAX_RETRIES if is_repeatable else 0)):
            session = min(self._sessions, key=lambda candidate: (not candidate.is_connected, candidate.in_flight))
            try:
                async with asyncio.timeout_at(deadline):
                    return _to_result(await session.call(tool, arguments))
            except TimeoutError:
                return self._too_late(session, tool, limit_s=limit_s)
            except CallFailedError as error:
                return failure(ToolStatus.TOOL_ERROR, f"{tool} failed: {error}")
            except SessionClosedError:
                return failure(ToolStatus.CANCELLED, f"{tool} was cancelled: the tools were closed")
            except SessionLostError as error:
                reason = str(error)
        logger.warning("tool server %s died during a call of %s: %s", self.server.name, tool, reason)
        return failure(ToolStatus.CRASHED, f"{tool} crashed")

    def _too_late(self, session: McpSession, tool: str, *, limit_s: float) -> ToolResult:
        if not session.is_connected:
            logger.warning("tool server %s is down: %s", self.server.name, session.last_error)
            return failure(ToolStatus.CRASHED, f"{tool} is not available: its server is down")
        session.check_health()
        return failure(ToolStatus.TIMEOUT, f"{tool} did not answer within {limit_s:g} s")

    async def close(self) -> None:
        """End all sessions."""
        await asyncio.gather(*(session.close() for session in self._sessions))


def _to_result(result: types.CallToolResult) -> ToolResult:
    text = result_text(result)
    if result.is_error:
        return ToolResult(status=ToolStatus.TOOL_ERROR, content=text, error=text or "the tool reported an error")
    return ToolResult(status=ToolStatus.OK, content=text)


def _name_tools(listed: Sequence[tuple[_ServerPool, Sequence[types.Tool]]]) -> list[_McpTool]:
    counts = Counter(name for _, tools in listed for name in {tool.name for tool in tools})
    named = []
    for pool, tools in listed:
        for tool in tools:
            server = pool.server
            spec = ToolSpec(
                name=f"{server.name}.{tool.name}" if counts[tool.name] > 1 else tool.name,
                description=tool.description or "",
                parameters=tool.input_schema,
                server=server.name,
                recovery=server.recovery,
            )
            named.append(_McpTool(spec=spec, check=ArgumentCheck(spec), pool=pool, remote_name=tool.name))
    return named


async def _all_or_first_error(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results; as soon as one fails, its error, once the others have ended."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        if tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _close_all(pools: Sequence[_ServerPool]) -> None:
    await asyncio.gather(*(pool.close() for pool in pools))
