"""`agentrl tools serve|list|call|trace|doctor CONFIG`: tool servers without a run.

CONFIG is a file with `mcpServers`, or the URL of one endpoint. How long servers and calls may take are settings, like
`--tool_timeout_s` and `--tool_connect_timeout_s`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from agentrl.cli.invocation import Invocation, positive_int
from agentrl.cli.service import until_stopped, with_stop_signals
from agentrl.cli.tools_report import CallTrace, ServerCheck, print_call, print_checks, print_tools
from agentrl.config import ToolsConfig
from agentrl.errors import ConfigError, ToolServerError
from agentrl.tools import McpToolbox, ServerConfig, load_server_configs, open_toolbox
from agentrl.tools.gateway_health import gateway_problems
from agentrl.tools.servers.serving import listen
from agentrl.types import ToolRequest, ToolResult, ToolStatus

TOKEN_VARIABLE = "MCP_GATEWAY_TOKEN"
EXIT_CALL_FAILED = 1
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
_CALLING = frozenset({"call", "trace"})
_ACTIONS = ("serve", "list", "call", "trace", "doctor")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to do with which servers."""
    parser.add_argument(
        "action",
        choices=_ACTIONS,
        help="serve them as a gateway, list tools, call one, call one and tell all that happened, check servers",
    )
    parser.add_argument("servers", metavar="CONFIG", help="file with `mcpServers`, or the URL of one endpoint")
    parser.add_argument("tool", metavar="TOOL", nargs="?", help="call, trace: name of the tool")
    parser.add_argument(
        "tool_arguments", metavar="ARGUMENTS", nargs="?", default="{}", help="call, trace: its JSON arguments"
    )
    parser.add_argument("--json", action="store_true", dest="as_json", help="all but serve: JSON instead of text")
    parser.add_argument("--host", default="127.0.0.1", help="serve: address; not loopback needs a token (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="serve: port; 0 picks a free one (%(default)s)")
    parser.add_argument("--max-in-flight", type=positive_int, default=64, help="serve: calls at a time (%(default)s)")


def run(invocation: Invocation) -> int:
    """Dispatch the action; exit code 1 for a failed call or a server with a problem."""
    arguments = invocation.arguments
    config = tools_config(invocation.config.tools, arguments.servers)
    if (arguments.tool is not None) != (arguments.action in _CALLING):
        wanted = "needs the name of a tool" if arguments.action in _CALLING else "takes nothing but CONFIG"
        raise ConfigError(f"agentrl tools {arguments.action} {wanted}")
    if arguments.action == "serve":
        return _serve(config, arguments)
    if arguments.action == "list":
        return asyncio.run(_list(config, as_json=arguments.as_json))
    if arguments.action in _CALLING:
        request = ToolRequest(call_id="cli", name=arguments.tool, arguments=_parse_arguments(arguments.tool_arguments))
        notes = _TimedNotes() if arguments.action == "trace" else _Notes()
        return asyncio.run(_call(config, request, notes=notes, as_json=arguments.as_json))
    return asyncio.run(_check(config, as_json=arguments.as_json))


def tools_config(config: ToolsConfig, servers: str) -> ToolsConfig:
    """The tool settings with the servers named on the command line instead of those of the settings."""
    chosen: dict[str, Path | str | None] = dict.fromkeys(("mcp_config", "mcp_manager_url", "tool_config_path"))
    if servers.startswith(("http://", "https://")):
        chosen["mcp_manager_url"] = servers
    else:
        is_mirorl = Path(servers).suffix in {".yml", ".yaml"}
        chosen["tool_config_path" if is_mirorl else "mcp_config"] = Path(servers)
    return config.model_copy(update=chosen)


def _parse_arguments(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f'ARGUMENTS: not JSON ({error}); write for example \'{{"query": "Emba"}}\'') from error
    if not isinstance(value, dict):
        raise ConfigError(f"ARGUMENTS: expected a JSON object, got {type(value).__name__}")
    return value


# --- serve ---


def _serve(config: ToolsConfig, arguments: argparse.Namespace) -> int:
    from agentrl.tools.gateway.calls import GatewayLimits
    from agentrl.tools.gateway.serving import serve_gateway

    token = os.environ.get(TOKEN_VARIABLE) or None
    if token is None and arguments.host not in _LOOPBACK:
        raise ConfigError(
            f"--host {arguments.host} is open to others: set {TOKEN_VARIABLE} to a token clients must send"
        )
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    limits = GatewayLimits(max_in_flight=arguments.max_in_flight)

    def announce(base: str) -> None:
        sys.stderr.write(f"serving {base}/mcp and {base}/mcpapi\n")
        sys.stderr.flush()

    async def serve() -> None:
        async with _opened(config) as toolbox:
            await serve_gateway(
                toolbox, listener, token=token, limits=limits, on_ready=announce, breakers=toolbox.breaker_states
            )

    async def body(stop: asyncio.Event) -> None:
        await until_stopped(serve(), stop=stop)

    with _listen(arguments.host, arguments.port) as listener:
        asyncio.run(with_stop_signals(body))
    return 0


def _listen(host: str, port: int) -> socket.socket:
    try:
        return listen(host, port)
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port}: {error.strerror or error}; choose others") from error


@asynccontextmanager
async def _opened(config: ToolsConfig) -> AsyncIterator[McpToolbox]:
    toolbox = await open_toolbox(config)
    try:
        yield toolbox
    finally:
        await toolbox.close()


# --- list, call, doctor ---


async def _list(config: ToolsConfig, *, as_json: bool) -> int:
    async with _opened(config) as toolbox:
        print_tools(toolbox.list_tools(), as_json=as_json)
    return 0


async def _call(config: ToolsConfig, request: ToolRequest, *, notes: _Notes, as_json: bool) -> int:
    began = time.monotonic()
    with notes.kept():
        start_s, call_s, result = await _timed_call(config, request, began=began)
    trace = CallTrace(request=request, result=result, start_s=start_s, call_s=call_s, notes=tuple(notes.lines))
    print_call(trace, as_json=as_json)
    return 0 if result.status is ToolStatus.OK else EXIT_CALL_FAILED


async def _timed_call(config: ToolsConfig, request: ToolRequest, *, began: float) -> tuple[float, float, ToolResult]:
    """Seconds until the servers had started, seconds of the call, and its result."""
    async with _opened(config) as toolbox:
        start_s = time.monotonic() - began
        result = await toolbox.call(request, deadline_s=config.tool_timeout_s)
        return start_s, time.monotonic() - began - start_s, result


async def _check(config: ToolsConfig, *, as_json: bool) -> int:
    checks = [await _check_server(server, config) for server in load_server_configs(config)]
    print_checks(checks, as_json=as_json)
    return EXIT_CALL_FAILED if any(check.problems for check in checks) else 0


async def _check_server(server: ServerConfig, config: ToolsConfig) -> ServerCheck:
    """Start one server alone; what is wrong with it is a finding, not an error."""
    notes = _Notes()
    logger = logging.getLogger("agentrl.tools")
    logger.addHandler(notes)
    began = time.monotonic()
    try:
        toolbox = await McpToolbox.open(
            [server],
            connect_timeout_s=config.tool_connect_timeout_s,
            max_result_chars=config.max_tool_result_chars,
            rng=random.Random(),
        )
    except ToolServerError as error:
        return ServerCheck(server=server, start_s=time.monotonic() - began, tools=(), problems=(str(error),))
    finally:
        logger.removeHandler(notes)
    start_s = time.monotonic() - began
    tools = tuple(toolbox.list_tools())
    await toolbox.close()
    problems = list(notes.lines) if tools else [*notes.lines, "it has no tools"]
    problems += await gateway_problems(server)
    problems += [f"tool {tool.name} has no description: the model cannot know when to use it" for tool in tools
                 if not tool.description.strip()]  # fmt: skip
    return ServerCheck(server=server, start_s=start_s, tools=tools, problems=tuple(problems))


class _Notes(logging.Handler):
    """Keeps what the tool client logs: retries, restarts, broken schemas."""

    sources: Sequence[str] = ("agentrl.tools",)

    def __init__(self, level: int = logging.INFO) -> None:
        super().__init__(level)
        self.lines: list[str] = []

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep what is logged meanwhile."""
        loggers = [logging.getLogger(name) for name in self.sources]
        levels = [logger.level for logger in loggers]
        for logger in loggers:
            logger.addHandler(self)
            logger.setLevel(self.level)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.removeHandler(self)
                logger.setLevel(level)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one message."""
        self.lines.append(record.getMessage())


class _TimedNotes(_Notes):
    """Keeps everything, with its time: what servers write to stderr, HTTP requests, what the MCP client says."""

    sources = ("agentrl.tools", "mcp", "httpx2")

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self._began = time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one message."""
        self.lines.append(f"+{time.monotonic() - self._began:.3f} s  {record.getMessage()}")
