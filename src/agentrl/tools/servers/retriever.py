r"""MCP server with one tool, `search(query)`, over a dense retriever that is served beside it, as Search-R1 has it.

POST {"queries": ["..."], "topk": 3, "return_scores": true}
-> {"result": [[{"document": {"contents": "title\ntext"}, "score": 0.8}, ...]]}
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping
from typing import Any

from agentrl.tools.servers.connector import Connector, Service, cut, status_of_code
from agentrl.tools.servers.serving import OperationError, ServedTool, add_transport_flags, make_server, serve

RETRIEVER_URL = "http://127.0.0.1:8000/retrieve"


def retriever_service(url: str, *, timeout_s: float) -> Service:
    """The retriever at `url`; it asks for no key."""
    return Service(name="the retriever", url=url, headers={}, timeout_s=timeout_s, status_of=status_of_code)


def retriever_tool(connector: Connector, *, top_k: int, max_chars: int) -> ServedTool:
    """The tool over one connector: the best `top_k` passages with their titles."""

    async def run(arguments: Mapping[str, Any]) -> str:
        body = {"queries": [arguments["query"]], "topk": top_k, "return_scores": True}
        passages = _passages(await connector.post(body))
        shown = [_shown(number, contents) for number, contents in enumerate(passages[:top_k], start=1)]
        return cut("\n".join(shown) or "No results.", max_chars=max_chars)

    return ServedTool(
        name="search",
        description="Search an encyclopedia. Returns the passages that fit the query best.",
        properties={"query": {"type": "string", "minLength": 1, "maxLength": 2000}},
        required=("query",),
        run=run,
    )


def _passages(reply: Any) -> list[str]:
    try:
        (found,) = reply["result"]
        return [str(passage["document"]["contents"]) for passage in found]
    except (KeyError, TypeError, ValueError) as error:
        raise OperationError("the retriever answered what is no list of passages for one query") from error


def _shown(number: int, contents: str) -> str:
    title, _, text = contents.partition("\n")
    name = title.strip().strip('"')
    return f"[{number}] {name}: {' '.join(text.split())}"


def main() -> None:
    """Command line of the server."""
    parser = argparse.ArgumentParser(description="MCP server: search by a dense retriever")
    parser.add_argument("--url", default=RETRIEVER_URL, help="the retriever (default: %(default)s)")
    parser.add_argument("--timeout-s", type=float, default=25.0, help="seconds of a search, retries included")
    parser.add_argument("--top-k", type=int, default=3, help="passages per search (default: %(default)s)")
    parser.add_argument("--max-chars", type=int, default=20_000, help="length of an answer (default: %(default)s)")
    add_transport_flags(parser)
    flags = parser.parse_args()
    connector = Connector(retriever_service(flags.url, timeout_s=flags.timeout_s), rng=random.Random())
    serve(make_server("search", retriever_tool(connector, top_k=flags.top_k, max_chars=flags.max_chars)), flags)


if __name__ == "__main__":
    main()
