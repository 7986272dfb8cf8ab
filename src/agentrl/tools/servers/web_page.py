"""MCP server with one tool, `read_page(url)`: a page as text, by a Jina-style reader (works without a key, slower).

The key is read from JINA_API_KEY, never from the command line; `--url` names another service of the same form.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Mapping
from typing import Any

from agentrl.tools.servers.connector import Connector, Service, cut, status_of_code
from agentrl.tools.servers.serving import OperationError, ServedTool, add_transport_flags, make_server, serve

JINA_URL = "https://r.jina.ai/"
KEY_VARIABLE = "JINA_API_KEY"


def page_service(url: str, *, key: str | None, timeout_s: float) -> Service:
    """The service as Jina's reader speaks: the key as bearer token."""
    headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    return Service(name="page reader", url=url, headers=headers, timeout_s=timeout_s, status_of=status_of_code)


def read_page_tool(connector: Connector, *, max_chars: int) -> ServedTool:
    """The tool over one connector."""

    async def run(arguments: Mapping[str, Any]) -> str:
        reply = await connector.post({"url": arguments["url"]})
        page = reply.get("data") if isinstance(reply, dict) else None
        content = page.get("content") if isinstance(page, dict) else None
        if not isinstance(page, dict) or not isinstance(content, str):
            raise OperationError("page reader answered without the page's content")
        title = page.get("title") or ""
        return cut(f"{title}\n\n{content}".strip() or "The page has no text.", max_chars=max_chars)

    return ServedTool(
        name="read_page",
        description="Read a web page as text.",
        properties={"url": {"type": "string", "pattern": r"^https?://[^\s]+$", "maxLength": 4000}},
        required=("url",),
        run=run,
    )


def main() -> None:
    """Command line of the server."""
    parser = argparse.ArgumentParser(description="MCP server: web pages as text by a Jina-style reader")
    parser.add_argument("--url", default=JINA_URL, help="the service (default: %(default)s)")
    parser.add_argument("--timeout-s", type=float, default=25.0, help="seconds of a page, retries included")
    parser.add_argument("--max-chars", type=int, default=40_000, help="length of an answer (default: %(default)s)")
    add_transport_flags(parser)
    flags = parser.parse_args()
    service = page_service(flags.url, key=os.environ.get(KEY_VARIABLE), timeout_s=flags.timeout_s)
    connector = Connector(service, rng=random.Random())
    serve(make_server("web_page", read_page_tool(connector, max_chars=flags.max_chars)), flags)


if __name__ == "__main__":
    main()
