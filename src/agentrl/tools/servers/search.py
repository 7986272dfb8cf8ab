"""MCP server with one tool, `search(query)`, over a JSONL corpus of {"id", "title", "text"} lines.

A query equal to a title (letter case aside) returns the documents of that title. Any other query is answered by
BM25 over title and text (SQLite FTS5, in memory), best `top_k` documents, one a line; `No results.` if no word
matches. The answer is cut at `max_chars`.
"""

from __future__ import annotations

import argparse
import json
import re
import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path

from agentrl.tools.servers.serving import add_transport_flags, make_server, serve

BUNDLED_CORPUS = Path(__file__).with_name("corpus.jsonl")
NO_RESULTS = "No results."
MAX_QUERY_WORDS = 64
_WORD = re.compile(r"\w+")


class CorpusError(ValueError):
    """A corpus line is not a document; says which one."""


class SearchIndex:
    """Title lookup and BM25 over documents, in memory."""

    def __init__(self, documents: Iterable[Mapping[str, str]]) -> None:
        self._by_title: dict[str, list[str]] = {}
        self._database = sqlite3.connect(":memory:")
        self._database.execute("CREATE VIRTUAL TABLE documents USING fts5(title, text, tokenize='unicode61')")
        rows = [(document["title"], document["text"]) for document in documents]
        self._database.executemany("INSERT INTO documents (title, text) VALUES (?, ?)", rows)
        for title, text in rows:
            self._by_title.setdefault(_title_key(title), []).append(text)

    def __len__(self) -> int:
        return int(self._database.execute("SELECT count(*) FROM documents").fetchone()[0])

    def search(self, query: str, *, top_k: int, max_chars: int) -> str:
        """Texts of the best documents, one a line, or the text that says there are none."""
        texts = self._by_title.get(_title_key(query)) or self._rank(query, top_k=top_k)
        return "\n".join(texts)[:max_chars] if texts else NO_RESULTS

    def _rank(self, query: str, *, top_k: int) -> list[str]:
        words = _WORD.findall(query)[:MAX_QUERY_WORDS]
        if not words:
            return []
        # Quoted words joined by OR: nothing of the query is read as FTS5 syntax.
        expression = " OR ".join(f'"{word}"' for word in words)
        rows = self._database.execute(
            "SELECT text FROM documents WHERE documents MATCH ? ORDER BY bm25(documents), rowid LIMIT ?",
            (expression, top_k),
        )
        return [text for (text,) in rows]


def load_corpus(path: Path) -> list[dict[str, str]]:
    """Documents of a JSONL file. Raises CorpusError naming the first bad line."""
    documents = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                documents.append(_parse_document(line, where=f"{path}:{number}"))
    return documents


def _parse_document(line: str, *, where: str) -> dict[str, str]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise CorpusError(f"{where}: not JSON ({error})") from error
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in ("id", "title", "text")):
        raise CorpusError(f'{where}: expected an object with the strings "id", "title" and "text"')
    return {key: row[key] for key in ("id", "title", "text")}


def _title_key(text: str) -> str:
    return " ".join(text.split()).casefold()


def main() -> None:
    """Command line of the server."""
    parser = argparse.ArgumentParser(description="MCP server: search in a JSONL corpus")
    parser.add_argument("--corpus", type=Path, default=BUNDLED_CORPUS, help="JSONL with id, title, text")
    parser.add_argument("--top-k", type=int, default=1, help="documents per answer (default: %(default)s)")
    parser.add_argument("--max-chars", type=int, default=4000, help="length of an answer (default: %(default)s)")
    add_transport_flags(parser)
    flags = parser.parse_args()
    try:
        index = SearchIndex(load_corpus(flags.corpus))
    except (OSError, CorpusError) as error:
        parser.error(str(error))
    server = make_server(
        "search",
        argument="query",
        description="Look up a name or words in the encyclopedia",
        run=lambda query: index.search(query, top_k=flags.top_k, max_chars=flags.max_chars),
    )
    serve(server, flags)


if __name__ == "__main__":
    main()
