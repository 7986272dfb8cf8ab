"""BM25 over documents: SQLite's FTS5, in memory or in a file beside the corpus that is built once.

The file is rebuilt when a corpus file changed in size or time. Two servers that start together build it once: the
second waits for the first. A build that was killed leaves nothing that is taken for an index.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from agentrl.tools.servers.corpus_files import CorpusError, Document, corpus_files, read_corpus

MAX_QUERY_WORDS = 64
_FORMAT = 1
_WORD = re.compile(r"\w+")
_SCHEMA = """
CREATE TABLE documents (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, title TEXT, title_key TEXT, text TEXT);
CREATE INDEX by_title ON documents (title_key);
CREATE VIRTUAL TABLE words USING fts5 (title, text, content='documents', content_rowid='number', tokenize='unicode61');
"""
_COLUMNS = "documents.id, documents.title, documents.text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """One search result: `excerpt` holds words of the query where the text has them."""

    document: Document
    excerpt: str


class DocumentIndex:
    """Documents by id, by title and by words. Safe to use from several threads, one at a time."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self._lock = threading.Lock()

    @classmethod
    def in_memory(cls, documents: Iterable[Document]) -> DocumentIndex:
        """An index of its own. Raises CorpusError if two documents have the same id."""
        database = sqlite3.connect(":memory:", check_same_thread=False)
        _fill(database, documents)
        return cls(database)

    @classmethod
    def beside(cls, corpus: Path) -> DocumentIndex:
        """The index in the file beside `corpus`, built if it is missing or old. Raises CorpusError or OSError."""
        path, fingerprint = index_path(corpus), _fingerprint(corpus)
        with _locked(path.with_name(path.name + ".lock")):
            if _stored_fingerprint(path) != fingerprint:
                _build(path, corpus, fingerprint=fingerprint)
        return cls(_open_read_only(path))

    def __len__(self) -> int:
        return int(self._rows("SELECT count(*) FROM documents", ())[0][0])

    def get(self, identifier: str) -> Document | None:
        """The document with this id."""
        found = self._documents(f"SELECT {_COLUMNS} FROM documents WHERE id = ?", (identifier,))
        return found[0] if found else None

    def titled(self, title: str) -> list[Document]:
        """Documents of this title, letter case and spaces aside, in the order of the corpus."""
        query = f"SELECT {_COLUMNS} FROM documents WHERE title_key = ? ORDER BY number"
        return self._documents(query, (_title_key(title),))

    def rank(self, query: str, *, top_k: int, in_titles: bool = False) -> list[Document]:
        """The best documents for the words of `query`; with `in_titles`, those with a word of it in their title."""
        return [hit.document for hit in self.hits(query, top_k=top_k, in_titles=in_titles)]

    def hits(self, query: str, *, top_k: int, in_titles: bool = False) -> list[Hit]:
        """The same with excerpts."""
        words = _WORD.findall(query.encode("utf-8", "replace").decode("utf-8"))[:MAX_QUERY_WORDS]
        if not words:
            return []
        # Quoted words joined by OR: nothing of the query is read as FTS5 syntax. Ranked first, read afterwards.
        expression = " OR ".join(f'"{word}"' for word in words)
        if in_titles:
            expression = f"title : ({expression})"
        best = self._rows(
            "SELECT rowid FROM words WHERE words MATCH ? ORDER BY bm25(words), rowid LIMIT ?", (expression, top_k)
        )
        hits = [self._hit(number, expression=expression) for (number,) in best]
        return [hit for hit in hits if hit is not None]

    def _hit(self, number: object, *, expression: str) -> Hit | None:
        # One by one: beside the ranking, SQLite would cut an excerpt of every document that matches.
        rows = self._rows(
            f"SELECT {_COLUMNS}, snippet(words, 1, '', '', ' ... ', 48) FROM words JOIN documents "
            "ON documents.number = words.rowid WHERE words MATCH ? AND words.rowid = ?",
            (expression, number),
        )
        if not rows:
            return None
        identifier, title, text, excerpt = rows[0]
        return Hit(document=Document(id=identifier, title=title, text=text), excerpt=excerpt)

    def close(self) -> None:
        """Close the database."""
        self._database.close()

    def _documents(self, query: str, values: tuple[object, ...]) -> list[Document]:
        return [
            Document(id=identifier, title=title, text=text) for identifier, title, text in self._rows(query, values)
        ]

    def _rows(self, query: str, values: tuple[object, ...]) -> list[tuple[str, ...]]:
        with self._lock:
            return self._database.execute(query, values).fetchall()


def index_path(corpus: Path) -> Path:
    """Where the index of a corpus is kept: inside a folder, beside a file."""
    return corpus / ".agentrl-index" if corpus.is_dir() else corpus.with_name(f".{corpus.name}.agentrl-index")


def _fill(database: sqlite3.Connection, documents: Iterable[Document]) -> None:
    database.executescript(_SCHEMA)
    rows = ((document.id, document.title, _title_key(document.title), document.text) for document in documents)
    try:
        database.executemany("INSERT INTO documents (id, title, title_key, text) VALUES (?, ?, ?, ?)", rows)
    except sqlite3.IntegrityError as error:
        last = database.execute("SELECT id FROM documents ORDER BY number DESC LIMIT 1").fetchone()
        raise CorpusError(f"two documents have the same id; the second follows document {last[0]!r}") from error
    database.execute("INSERT INTO words (words) VALUES ('rebuild')")
    database.commit()


def _build(path: Path, corpus: Path, *, fingerprint: str) -> None:
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.unlink(missing_ok=True)
    database = sqlite3.connect(unfinished)
    try:
        # Nothing of an unfinished file is ever used, so it need not survive a crash.
        database.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;")
        _fill(database, read_corpus(corpus))
        database.execute("CREATE TABLE built (fingerprint TEXT)")
        database.execute("INSERT INTO built VALUES (?)", (fingerprint,))
        database.commit()
    except BaseException:
        database.close()
        unfinished.unlink(missing_ok=True)
        raise
    database.close()
    unfinished.replace(path)


def _open_read_only(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, check_same_thread=False)


def _stored_fingerprint(path: Path) -> str | None:
    if not path.is_file():
        return None
    try:
        database = _open_read_only(path)
        try:
            row = database.execute("SELECT fingerprint FROM built").fetchone()
        finally:
            database.close()
    except sqlite3.DatabaseError:
        return None
    return None if row is None else str(row[0])


def _fingerprint(corpus: Path) -> str:
    files = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in corpus_files(corpus)]
    return hashlib.sha256(json.dumps([_FORMAT, files]).encode()).hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # held by a live builder only: it ends with the process
        yield
    finally:
        with suppress(OSError):
            os.close(descriptor)


def _title_key(text: str) -> str:
    return " ".join(text.split()).casefold()
