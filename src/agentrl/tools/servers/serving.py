"""Serves tools over MCP, for the bundled servers: stdio by default, streamable HTTP with `--http`.

A stdio server ends when its stdin closes, so it never outlives the process that started it.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jsonschema
import mcp_types as types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

from agentrl.tools.result_meta import RETRY_META, STATUS_META

HTTP_PATH = "/mcp"
_MAX_PROBLEM_CHARS = 300


class OperationError(Exception):
    """The tool's own error; the model reads `error: <message>`.

    `status` says that the service behind the tool is to blame (see `STATUS_META`), not what the model asked for.
    """

    def __init__(self, message: str, *, status: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTool:
    """One tool. `run` gets arguments that fit `properties`, returns the text of the result or raises OperationError."""

    name: str
    description: str
    properties: Mapping[str, Mapping[str, Any]]  # JSON schema of each argument
    required: tuple[str, ...]
    run: Callable[[Mapping[str, Any]], Awaitable[str]]

    @property
    def input_schema(self) -> dict[str, Any]:
        """JSON schema of the arguments object; nothing else is allowed."""
        return {
            "type": "object",
            "properties": {name: dict(schema) for name, schema in self.properties.items()},
            "required": list(self.required),
            "additionalProperties": False,
        }


def text_tool(name: str, *, argument: str, description: str, run: Callable[[str], str]) -> ServedTool:
    """A tool of one string argument. `run` must be quick: it is called on the event loop."""

    async def call(arguments: Mapping[str, Any]) -> str:
        return run(arguments[argument])

    return ServedTool(
        name=name,
        description=description,
        properties={argument: {"type": "string"}},
        required=(argument,),
        run=call,
    )


def make_server(name: str, *tools: ServedTool) -> Server[Any]:
    """A server with these tools. Arguments are checked before a tool runs."""
    by_name = {tool.name: tool for tool in tools}
    listed = [
        types.Tool(name=tool.name, description=tool.description, input_schema=tool.input_schema) for tool in tools
    ]
    checks = {tool.name: jsonschema.Draft202012Validator(tool.input_schema) for tool in tools}

    async def list_tools(_context: Any, _params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=listed)

    async def call_tool(_context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        tool = by_name.get(params.name)
        if tool is None:
            return _failed(OperationError(f"unknown tool {params.name!r}"))
        arguments = params.arguments or {}
        problem = jsonschema.exceptions.best_match(checks[tool.name].iter_errors(arguments))
        if problem is not None:
            where = ".".join(str(part) for part in problem.absolute_path)
            return _failed(OperationError(f"{where}: {problem.message}".removeprefix(": ")[:_MAX_PROBLEM_CHARS]))
        try:
            text = await tool.run(arguments)
        except OperationError as error:
            return _failed(error)
        return types.CallToolResult(content=[types.TextContent(type="text", text=text)], is_error=False)

    return Server(name, on_list_tools=list_tools, on_call_tool=call_tool)


def add_transport_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--http`, `--host` and `--port` to a server's command line."""
    parser.add_argument("--http", action="store_true", help="serve streamable HTTP instead of stdio")
    parser.add_argument("--host", default="127.0.0.1", help="address of --http (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port of --http; 0 picks a free one (default)")


def serve(server: Server[Any], flags: argparse.Namespace) -> None:
    """Serve until stdin closes (stdio), or until a signal ends the process (HTTP)."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    asyncio.run(_serve_http(server, host=flags.host, port=flags.port) if flags.http else _serve_stdio(server))


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 picks a free one. Raises OSError."""
    listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    # Accepted sockets inherit it. asyncio sets it on sockets it made itself only, and without it a reply in two
    # pieces waits 40 ms for the client's delayed acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


async def _serve_stdio(server: Server[Any]) -> None:
    async with stdio_server() as (read_stream, write_stream):
        await server.run(read_stream, write_stream, server.create_initialization_options())


async def _serve_http(server: Server[Any], *, host: str, port: int) -> None:
    import uvicorn  # only the HTTP form pays for it

    app = server.streamable_http_app(streamable_http_path=HTTP_PATH, json_response=True, host=host)
    with listen(host, port) as listener:
        address = listener.getsockname()
        sys.stderr.write(f"listening on http://{address[0]}:{address[1]}{HTTP_PATH}\n")
        sys.stderr.flush()
        await uvicorn.Server(uvicorn.Config(app, log_level="warning")).serve(sockets=[listener])


def _failed(error: OperationError) -> types.CallToolResult:
    meta: dict[str, Any] = {}
    if error.status is not None:
        meta[STATUS_META] = error.status
    if error.retry_after_s is not None:
        meta[RETRY_META] = error.retry_after_s
    content: list[types.ContentBlock] = [types.TextContent(type="text", text=f"error: {error}")]
    return types.CallToolResult.model_validate(
        {"content": content, "isError": True, **({"_meta": meta} if meta else {})}
    )
