"""MCP server with `search(query)` and `fetch(id)` over a local corpus (see corpus_files.py for what may be one).

    search   ids, titles and excerpts of the best documents by BM25; a document of exactly that title comes first
    fetch    a document by its id, in pieces of `--max-chars`: `start` says where a piece begins

The index is built once and kept beside the corpus; in memory with `--in-memory`, or where that folder is read-only.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.tools.servers.corpus_files import CorpusError, read_corpus
from agentrl.tools.servers.corpus_index import DocumentIndex, Hit
from agentrl.tools.servers.serving import OperationError, ServedTool, add_transport_flags, make_server, serve

MAX_QUERY_CHARS = 2000
MAX_TOP_K = 20
_EXCERPT_CHARS = 400
_READ_ONLY = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


def corpus_tools(index: DocumentIndex, *, top_k: int, max_chars: int) -> list[ServedTool]:
    """Both tools over one index. Queries run in a thread: a large corpus takes its time."""

    async def search(arguments: Mapping[str, Any]) -> str:
        wanted = arguments.get("max_results", top_k)
        hits = await asyncio.to_thread(_search, index, arguments["query"], top_k=wanted)
        return "\n\n".join(_shown(hit) for hit in hits) or "No results."

    async def fetch(arguments: Mapping[str, Any]) -> str:
        document = await asyncio.to_thread(index.get, arguments["id"])
        if document is None:
            raise OperationError(f"there is no document {arguments['id']!r}; ids are in the results of search")
        return _piece(f"{document.title}\n\n{document.text}", start=arguments.get("start", 0), max_chars=max_chars)

    query = {"type": "string", "maxLength": MAX_QUERY_CHARS}
    number = {"type": "integer", "minimum": 1, "maximum": MAX_TOP_K}
    return [
        ServedTool(
            name="search",
            description="Search the corpus. Returns ids, titles and excerpts; read a document with fetch.",
            properties={"query": query, "max_results": number},
            required=("query",),
            run=search,
        ),
        ServedTool(
            name="fetch",
            description="Read a document by the id that search returned; start is the position to read on from.",
            properties={"id": {"type": "string", "maxLength": 1000}, "start": {"type": "integer", "minimum": 0}},
            required=("id",),
            run=fetch,
        ),
    ]


def open_index(corpus: Path, *, is_in_memory: bool) -> DocumentIndex:
    """The index of a corpus. Raises CorpusError or OSError."""
    if not is_in_memory:
        try:
            return DocumentIndex.beside(corpus)
        except OSError as error:
            if error.errno not in _READ_ONLY:
                raise
            sys.stderr.write(f"no index is kept: {error.filename} cannot be written\n")
    return DocumentIndex.in_memory(read_corpus(corpus))


def _search(index: DocumentIndex, query: str, *, top_k: int) -> list[Hit]:
    titled = [Hit(document=document, excerpt=document.text[:_EXCERPT_CHARS]) for document in index.titled(query)]
    known = {hit.document.id for hit in titled}
    return [*titled, *(hit for hit in index.hits(query, top_k=top_k) if hit.document.id not in known)][:top_k]


def _shown(hit: Hit) -> str:
    excerpt = " ".join(hit.excerpt.split())[:_EXCERPT_CHARS]
    return f"id: {hit.document.id}\ntitle: {hit.document.title}\n{excerpt}"


def _piece(text: str, *, start: int, max_chars: int) -> str:
    if start and start >= len(text):
        raise OperationError(f"start = {start} is beyond the end: the document has {len(text)} characters")
    end = start + max_chars
    rest = f"\n[{len(text) - end} characters follow: fetch again with start = {end}]" if end < len(text) else ""
    return text[start:end] + rest


def main() -> None:
    """Command line of the server."""
    parser = argparse.ArgumentParser(description="MCP server: search and fetch in a local corpus")
    parser.add_argument("--corpus", type=Path, required=True, help="folder, .jsonl or MediaWiki .xml (also .gz, .bz2)")
    parser.add_argument("--in-memory", action="store_true", help="keep no index beside the corpus")
    parser.add_argument("--top-k", type=int, default=5, help="results per search (default: %(default)s)")
    parser.add_argument("--max-chars", type=int, default=8000, help="length of a fetched piece (default: %(default)s)")
    add_transport_flags(parser)
    flags = parser.parse_args()
    if not (1 <= flags.top_k <= MAX_TOP_K and flags.max_chars >= 1):
        parser.error(f"--top-k must be 1 to {MAX_TOP_K}, --max-chars at least 1")
    began = time.monotonic()
    try:
        index = open_index(flags.corpus, is_in_memory=flags.in_memory)
    except (OSError, CorpusError) as error:
        parser.error(str(error))
    sys.stderr.write(f"{len(index)} documents, ready after {time.monotonic() - began:.1f} s\n")
    serve(make_server("corpus", *corpus_tools(index, top_k=flags.top_k, max_chars=flags.max_chars)), flags)


if __name__ == "__main__":
    main()
