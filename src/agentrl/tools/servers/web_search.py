"""MCP server with one tool, `web_search(query)`, over a Serper-style search API (needs a key from its provider).

The key is read from SERPER_API_KEY, never from the command line; `--url` names another service of the same form.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Iterator, Mapping
from typing import Any

from agentrl.tools.servers.connector import Connector, Service, cut, status_of_code
from agentrl.tools.servers.serving import OperationError, ServedTool, add_transport_flags, make_server, serve

SERPER_URL = "https://google.serper.dev/search"
KEY_VARIABLE = "SERPER_API_KEY"
MAX_RESULTS = 20
_BAD_REQUEST = 400


def search_service(url: str, *, key: str, timeout_s: float) -> Service:
    """The service as Serper speaks: the key in `X-API-KEY`."""
    return Service(name="web search", url=url, headers={"X-API-KEY": key}, timeout_s=timeout_s, status_of=_status_of)


def web_search_tool(connector: Connector, *, max_results: int, max_chars: int) -> ServedTool:
    """The tool over one connector."""

    async def run(arguments: Mapping[str, Any]) -> str:
        wanted = arguments.get("max_results", max_results)
        reply = await connector.post({"q": arguments["query"], "num": wanted})
        if not isinstance(reply, dict):
            raise OperationError("web search answered what is no result list")
        return cut("\n\n".join(_results(reply, limit=wanted)) or "No results.", max_chars=max_chars)

    return ServedTool(
        name="web_search",
        description="Search the web. Returns titles, addresses and snippets.",
        properties={
            "query": {"type": "string", "minLength": 1, "maxLength": 2000},
            "max_results": {"type": "integer", "minimum": 1, "maximum": MAX_RESULTS},
        },
        required=("query",),
        run=run,
    )


def _status_of(code: int, message: str) -> str | None:
    # Serper reports used-up credits as a bad request.
    return "quota" if code == _BAD_REQUEST and "credits" in message.lower() else status_of_code(code, message)


def _results(reply: Mapping[str, Any], *, limit: int) -> Iterator[str]:
    box = reply.get("answerBox")
    if isinstance(box, dict):
        answer = box.get("answer") or box.get("snippet")
        if answer:
            yield f"answer: {answer}\n{box.get('link', '')}".rstrip()
    organic = reply.get("organic")
    for row in (organic if isinstance(organic, list) else [])[:limit]:
        if isinstance(row, dict):
            date = f" ({row['date']})" if row.get("date") else ""
            yield f"{row.get('title', '')}{date}\n{row.get('link', '')}\n{row.get('snippet', '')}".strip()


def main() -> None:
    """Command line of the server."""
    parser = argparse.ArgumentParser(description="MCP server: web search by a Serper-style service")
    parser.add_argument("--url", default=SERPER_URL, help="the service (default: %(default)s)")
    parser.add_argument("--timeout-s", type=float, default=25.0, help="seconds of a search, retries included")
    parser.add_argument("--max-results", type=int, default=10, help="results per search (default: %(default)s)")
    parser.add_argument("--max-chars", type=int, default=20_000, help="length of an answer (default: %(default)s)")
    add_transport_flags(parser)
    flags = parser.parse_args()
    key = os.environ.get(KEY_VARIABLE)
    if not key:
        parser.error(f"{KEY_VARIABLE} is not set: put the key of your search service into the environment")
    service = search_service(flags.url, key=key, timeout_s=flags.timeout_s)
    connector = Connector(service, rng=random.Random())
    tool = web_search_tool(connector, max_results=flags.max_results, max_chars=flags.max_chars)
    serve(make_server("web_search", tool), flags)


if __name__ == "__main__":
    main()
