"""`McpToolbox`: the tools of all configured servers behind one Toolbox; `open_toolbox` starts it.

A call is checked against the tool's schema, then goes through its server's rate limit, circuit breaker and retries
(guard.py) to a session (pool.py, session.py) or to a gateway (gateway_client.py), all within one deadline. A call that
may have had an effect is sent again only if its server is declared `stateless`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from agentrl.config import ToolsConfig
from agentrl.errors import ToolServerError
from agentrl.protocols import Toolbox
from agentrl.tools.config_file import load_server_configs
from agentrl.tools.gateway_client import GatewayServer
from agentrl.tools.guard import BreakerState
from agentrl.tools.pool import ListedTool, PerRolloutServer, SharedServer, ToolServer, all_or_first_error
from agentrl.tools.requests import ArgumentCheck, cut, failure, refuse
from agentrl.tools.server_config import ServerConfig, SessionScope, TransportKind
from agentrl.types import ToolRequest, ToolResult, ToolSpec, ToolStatus

_LONGEST_NAME = 256

logger = logging.getLogger(__name__)


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
    """Implements protocols.Toolbox over tool servers. Use it in the event loop that opened it."""

    def __init__(self, servers: Sequence[ToolServer], tools: Sequence[_ServedTool], *, max_result_chars: int) -> None:
        self._servers = tuple(servers)
        self._tools = {tool.spec.name: tool for tool in tools}
        self._max_result_chars = max_result_chars
        self._is_closed = False
        self._ending: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(
        cls, servers: Sequence[ServerConfig], *, connect_timeout_s: float, max_result_chars: int, rng: random.Random
    ) -> McpToolbox:
        """Connect to all servers at the same time. Raises ToolServerError naming the first that fails."""
        started = [_make_server(server, connect_timeout_s=connect_timeout_s, rng=rng) for server in servers]
        try:
            listed = await all_or_first_error(server.start() for server in started)
            return cls(started, _name_tools(list(zip(started, listed, strict=True))), max_result_chars=max_result_chars)
        except BaseException:
            await _close_all(started)
            raise

    def list_tools(self) -> Sequence[ToolSpec]:
        """All tools, in the order of the configuration. Fixed after start."""
        return tuple(tool.spec for tool in self._tools.values())

    def breaker_states(self) -> Mapping[str, BreakerState]:
        """By server of the configuration, whether its circuit breaker lets calls through."""
        return {server.config.name: server.breaker_state for server in self._servers}

    async def call(self, request: ToolRequest, *, deadline_s: float) -> ToolResult:
        """One call within `deadline_s` and the server's own `timeout_s`; the outcome is typed, never raised."""
        return await self.call_on({}, request, deadline_s=deadline_s)

    async def call_on(
        self, own: Mapping[ToolServer, ToolServer], request: ToolRequest, *, deadline_s: float
    ) -> ToolResult:
        """The same, where `own` has taken the place of some servers."""
        refusal = refuse(request, self._tools)
        if refusal is not None:
            return refusal
        if self._is_closed:
            return failure(ToolStatus.CANCELLED, "the tools were closed")
        tool = self._tools[request.name]
        server = own.get(tool.server, tool.server)
        result = await server.call(tool.remote_name, request.arguments, deadline_s=deadline_s)
        said = server.config.without_secrets(result.content)
        error = None if result.error is None else server.config.without_secrets(result.error)
        content = cut(said, max_chars=self._max_result_chars)
        is_cut = len(said) > self._max_result_chars
        if is_cut:
            return replace(result, content=content, error=error, items=(), structured=None)
        items, structured = map(server.config.json_without_secrets, (result.items, result.structured))
        return replace(result, content=content, error=error, items=items, structured=structured)

    @asynccontextmanager
    async def for_record(self) -> AsyncIterator[Toolbox]:
        """The tools of one Record: its own sessions with `per_rollout` servers, ended with the block."""
        own = {server: server.for_record() for server in self._servers}
        own = {server: lease for server, lease in own.items() if lease is not server}
        if not own:
            yield self
            return
        try:
            yield _RecordToolbox(self, own)
        finally:
            # A task, so that being cancelled here leaves nothing running: `close` waits for what is left.
            ending = asyncio.create_task(_close_all(list(own.values())))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            await asyncio.shield(ending)

    async def close(self) -> None:
        """End every child process, connection and running call. Safe to repeat."""
        self._is_closed = True
        await _close_all(self._servers)
        await asyncio.gather(*self._ending)


class _RecordToolbox:
    """Implements protocols.Toolbox for one Record."""

    def __init__(self, shared: McpToolbox, own: Mapping[ToolServer, ToolServer]) -> None:
        self._shared = shared
        self._own = own

    def list_tools(self) -> Sequence[ToolSpec]:
        """The tools of all Records."""
        return self._shared.list_tools()

    async def call(self, request: ToolRequest, *, deadline_s: float) -> ToolResult:
        """One call, in the Record's own session where its server has one."""
        return await self._shared.call_on(self._own, request, deadline_s=deadline_s)

    @asynccontextmanager
    async def for_record(self) -> AsyncIterator[Toolbox]:
        """Itself: it is one Record's already."""
        yield self

    async def close(self) -> None:
        """End the Record's own sessions; the rest belongs to all."""
        await _close_all(list(self._own.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _ServedTool:
    spec: ToolSpec
    check: ArgumentCheck
    server: ToolServer
    remote_name: str


def _make_server(config: ServerConfig, *, connect_timeout_s: float, rng: random.Random) -> ToolServer:
    if config.kind is TransportKind.GATEWAY:
        return GatewayServer(config, connect_timeout_s=connect_timeout_s, rng=rng)
    kind = PerRolloutServer if config.scope is SessionScope.PER_ROLLOUT else SharedServer
    return kind(config, connect_timeout_s=connect_timeout_s, rng=rng)


def _name_tools(listed: Sequence[tuple[ToolServer, Sequence[ListedTool]]]) -> list[_ServedTool]:
    """Bare names where they are unique, else `server.tool`. Raises ToolServerError if even that is not unique."""
    offered = [(server, tool) for server, tools in listed for tool in _shown(server.config, tools)]
    counts = Counter(tool.name for _, tool in offered)
    named = [_serve(tool, server=server, is_unique=counts[tool.name] == 1) for server, tool in offered]
    for name, count in Counter(tool.spec.name for tool in named).items():
        if count > 1:
            raise ToolServerError(f"{count} tools are called {name!r}: blacklist all but one, or rename a server")
    return named


def _shown(config: ServerConfig, tools: Sequence[ListedTool]) -> list[ListedTool]:
    """What the model may see: without the blacklist, and each name of a server once."""
    unknown = config.blacklist - {tool.name for tool in tools}
    if unknown:
        logger.warning("tool server %s: no tool to blacklist is called %s", config.name, ", ".join(sorted(unknown)))
    shown: dict[tuple[str, str], ListedTool] = {}
    for tool in tools:
        if tool.name in config.blacklist:
            continue
        if not tool.name.isprintable() or not 0 < len(tool.name) <= _LONGEST_NAME:
            logger.warning("tool server %s: %.80r is no name a model can call: left out", config.name, tool.name)
            continue
        if (tool.server, tool.name) in shown:
            logger.warning("tool server %s lists %r twice: the first is used", tool.server, tool.name)
        shown.setdefault((tool.server, tool.name), tool)
    return list(shown.values())


def _serve(tool: ListedTool, *, server: ToolServer, is_unique: bool) -> _ServedTool:
    # A bare name that begins like a full one would be taken apart as one.
    is_bare = is_unique and not tool.name.startswith(f"{tool.server}.")
    spec = ToolSpec(
        name=tool.name if is_bare else f"{tool.server}.{tool.name}",
        description=tool.description,
        parameters=tool.parameters,
        server=tool.server,
        recovery=server.config.recovery,
        timeout_s=server.config.timeout_s,
    )
    return _ServedTool(spec=spec, check=ArgumentCheck(spec), server=server, remote_name=tool.remote_name)


async def _close_all(servers: Sequence[ToolServer]) -> None:
    await asyncio.gather(*(server.close() for server in servers))
