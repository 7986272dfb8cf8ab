"""MCP server with one tool, `search(query)`, over a JSONL corpus of {"id", "title", "text"} lines.

A query equal to a title (letter case aside) returns the documents of that title. Any other query is answered by
BM25 over title and text (SQLite FTS5, in memory), best `top_k` documents, one a line; `No results.` if no word
matches. With `--titles-only` texts are not searched. The answer is cut at `max_chars`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from agentrl.tools.servers.corpus_files import CorpusError, Document, read_jsonl
from agentrl.tools.servers.corpus_index import DocumentIndex
from agentrl.tools.servers.serving import add_transport_flags, make_server, serve, text_tool

BUNDLED_CORPUS = Path(__file__).with_name("corpus.jsonl")
NO_RESULTS = "No results."


class SearchIndex:
    """Title lookup and BM25 over documents, in memory."""

    def __init__(self, documents: Iterable[Document], *, titles_only: bool = False) -> None:
        self._index = DocumentIndex.in_memory(documents)
        self._titles_only = titles_only

    def __len__(self) -> int:
        return len(self._index)

    def search(self, query: str, *, top_k: int, max_chars: int) -> str:
        """Texts of the best documents, one a line, or the text that says there are none."""
        found = self._index.titled(query) or self._index.rank(query, top_k=top_k, in_titles=self._titles_only)
        return "\n".join(document.text for document in found)[:max_chars] if found else NO_RESULTS


def load_corpus(path: Path) -> list[Document]:
    """Documents of a JSONL file. Raises CorpusError naming the first bad line."""
    return list(read_jsonl(path))


def main() -> None:
    """Command line of the server."""
    parser = argparse.ArgumentParser(description="MCP server: search in a JSONL corpus")
    parser.add_argument("--corpus", type=Path, default=BUNDLED_CORPUS, help="JSONL with id, title, text")
    parser.add_argument("--titles-only", action="store_true", help="search in titles, not in texts")
    parser.add_argument("--top-k", type=int, default=1, help="documents per answer (default: %(default)s)")
    parser.add_argument("--max-chars", type=int, default=4000, help="length of an answer (default: %(default)s)")
    add_transport_flags(parser)
    flags = parser.parse_args()
    try:
        index = SearchIndex(load_corpus(flags.corpus), titles_only=flags.titles_only)
    except (OSError, CorpusError) as error:
        parser.error(str(error))
    tool = text_tool(
        "search",
        argument="query",
        description="Look up a name or words in the encyclopedia",
        run=lambda query: index.search(query, top_k=flags.top_k, max_chars=flags.max_chars),
    )
    serve(make_server("search", tool), flags)


if __name__ == "__main__":
    main()
