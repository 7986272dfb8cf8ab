"""MCP server for tests: tools that work, fail, hang, crash and return odd things, over stdio, `--http` or `--sse`."""

import argparse
import asyncio
import os
from pathlib import Path

from mcp.server import MCPServer
from mcp_types import CallToolResult, ImageContent, TextContent

server = MCPServer("test", log_level="ERROR")


@server.tool(structured_output=False)
async def echo(text: str) -> str:
    """Repeat a text."""
    return text


@server.tool(structured_output=False)
async def add(a: int, b: int) -> str:
    """Add two integers."""
    return str(a + b)


@server.tool(structured_output=False)
async def fail() -> CallToolResult:
    """Report an error."""
    return CallToolResult(content=[TextContent(type="text", text="no luck")], is_error=True)


@server.tool(structured_output=False)
async def hang() -> str:
    """Never answer."""
    await asyncio.Event().wait()
    return ""


@server.tool(structured_output=False)
async def big(size: int) -> str:
    """Return many characters."""
    return "x" * size


@server.tool(structured_output=False)
async def image() -> list[TextContent | ImageContent]:
    """Return text, an image and more text."""
    picture = ImageContent(type="image", data="aGk=", mime_type="image/png")
    return [TextContent(type="text", text="before"), picture, TextContent(type="text", text="after")]


@server.tool(structured_output=False)
async def numbers() -> CallToolResult:
    """Return structured content only."""
    return CallToolResult(content=[], structured_content={"values": [1, 2]})


@server.tool(structured_output=False)
async def pid() -> str:
    """Return the server's process id."""
    return str(os.getpid())


@server.tool(structured_output=False)
def crash(log: str) -> str:
    """Note the call in a file, then die."""
    with Path(log).open("a", encoding="utf-8") as file:
        file.write("called\n")
    os._exit(7)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--http", type=int)
    parser.add_argument("--sse", type=int)
    flags = parser.parse_args()
    if flags.http is not None:
        server.run("streamable-http", port=flags.http)
    elif flags.sse is not None:
        server.run("sse", port=flags.sse)
    else:
        server.run("stdio")
