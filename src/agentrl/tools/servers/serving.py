"""Serves one tool over MCP, for the bundled servers: stdio by default, streamable HTTP with `--http`.

A stdio server ends when its stdin closes, so it never outlives the process that started it.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
import sys
from collections.abc import Callable
from typing import Any

import mcp_types as types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

HTTP_PATH = "/mcp"


class OperationError(Exception):
    """The tool's own error; the model reads `error: <message>`."""


def make_server(name: str, *, argument: str, description: str, run: Callable[[str], str]) -> Server[Any]:
    """A server with one tool of one string argument. `run` must be quick: it is called on the event loop."""
    schema = {
        "type": "object",
        "properties": {argument: {"type": "string"}},
        "required": [argument],
        "additionalProperties": False,
    }
    tool = types.Tool(name=name, description=description, input_schema=schema)

    async def list_tools(_context: Any, _params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[tool])

    async def call_tool(_context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        if params.name != name:
            return _text_result(f"error: unknown tool {params.name!r}", is_error=True)
        value = (params.arguments or {}).get(argument)
        if not isinstance(value, str):
            return _text_result(f"error: {argument} must be a string", is_error=True)
        try:
            return _text_result(run(value), is_error=False)
        except OperationError as error:
            return _text_result(f"error: {error}", is_error=True)

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


async def _serve_stdio(server: Server[Any]) -> None:
    async with stdio_server() as (read_stream, write_stream):
        await server.run(read_stream, write_stream, server.create_initialization_options())


async def _serve_http(server: Server[Any], *, host: str, port: int) -> None:
    import uvicorn  # only the HTTP form pays for it

    app = server.streamable_http_app(streamable_http_path=HTTP_PATH, json_response=True, host=host)
    with socket.create_server((host, port)) as listener:
        address = listener.getsockname()
        sys.stderr.write(f"listening on http://{address[0]}:{address[1]}{HTTP_PATH}\n")
        sys.stderr.flush()
        await uvicorn.Server(uvicorn.Config(app, log_level="warning")).serve(sockets=[listener])


def _text_result(text: str, *, is_error: bool) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(type="text", text=text)], is_error=is_error)
