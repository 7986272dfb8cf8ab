"""Documents of a local corpus: a folder of text, Markdown and HTML files, JSONL, or a MediaWiki XML dump.

    folder     one document a file; its id is the path inside the folder, its title the HTML title or first heading
    .jsonl     {"id", "text" or "contents", "title"}; id and title may be missing (line number; first line of the text)
    .xml       the dump of a wiki (pages-articles): one document a page of the main namespace, redirects left out

`.jsonl` and `.xml` may be compressed as `.gz` or `.bz2`. Everything is read as a stream.
"""

from __future__ import annotations

import bz2
import gzip
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import IO, Any
from xml.etree import ElementTree

TEXT_SUFFIXES = frozenset({".txt", ".md", ".markdown", ".rst", ".html", ".htm"})
MAX_FILE_BYTES = 32 * 1024 * 1024
_MAX_TITLE_CHARS = 200
_BLOCKS = frozenset(
    {"p", "br", "div", "li", "tr", "h1", "h2", "h3", "h4", "h5", "h6", "pre", "table", "section", "title"}
)
_UNSEEN = frozenset({"script", "style", "noscript", "template", "svg"})
_HEADING = re.compile(r"^#{1,6}\s+(.+)$", re.MULTILINE)
_TEMPLATE = re.compile(r"\{\{[^{}]*\}\}|\{\|[^{}]*\|\}")
_MAX_TEMPLATE_DEPTH = 10
_WIKI_STEPS = (
    (re.compile(r"<!--.*?-->|<ref[^>]*?/>|<ref.*?</ref>|<math.*?</math>", re.DOTALL), ""),
    (re.compile(r"\[\[(?:File|Image|Category):[^\[\]]*(?:\[\[[^\[\]]*\]\][^\[\]]*)*\]\]"), ""),
    (re.compile(r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]"), r"\1"),
    (re.compile(r"\[https?://\S+ ([^\]]*)\]"), r"\1"),
    (re.compile(r"<[^<>]+>"), ""),
    (re.compile(r"'{2,}"), ""),
    (re.compile(r"^=+\s*(.*?)\s*=+\s*$", re.MULTILINE), r"\1"),
    (re.compile(r"\n{3,}"), "\n\n"),
)


class CorpusError(ValueError):
    """A corpus cannot be read; says where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One document of a corpus."""

    id: str
    title: str
    text: str


def corpus_files(path: Path) -> list[Path]:
    """The files a corpus consists of, in order. Raises CorpusError if there is none."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise CorpusError(f"{path}: no such file or folder")
    inside = (file for file in path.rglob("*") if file.suffix.lower() in TEXT_SUFFIXES and file.is_file())
    files = sorted(file for file in inside if not any(part.startswith(".") for part in file.relative_to(path).parts))
    if not files:
        raise CorpusError(f"{path}: no file ends in {', '.join(sorted(TEXT_SUFFIXES))}")
    return files


def read_corpus(path: Path) -> Iterator[Document]:
    """All documents. Raises CorpusError naming the first that cannot be read."""
    if path.is_dir():
        yield from (_read_text_file(file, root=path) for file in corpus_files(path))
        return
    suffixes = [suffix for suffix in path.suffixes if suffix not in {".gz", ".bz2"}]
    kind = suffixes[-1].lower() if suffixes else ""
    if kind in {".jsonl", ".ndjson", ".json"}:
        yield from read_jsonl(path)
    elif kind == ".xml":
        yield from _read_wiki(path)
    elif kind in TEXT_SUFFIXES:
        yield _read_text_file(path, root=path.parent)
    else:
        raise CorpusError(f"{path}: not a corpus; expected a folder, .jsonl, .xml (each also .gz, .bz2) or a text file")


def read_jsonl(path: Path) -> Iterator[Document]:
    """Documents of a JSONL file. Raises CorpusError naming the first bad line."""
    with _open(path) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _parse_line(line, number=number, path=path)


def html_text(markup: str) -> tuple[str, str]:
    """Title and visible text of an HTML page."""
    reader = _HtmlReader()
    reader.feed(markup)
    reader.close()
    lines = (" ".join(line.split()) for line in "".join(reader.parts).split("\n"))
    return " ".join("".join(reader.title).split()), "\n".join(line for line in lines if line)


def wiki_text(markup: str) -> str:
    """Readable text of MediaWiki markup: templates, tables, references and files removed, links as their text."""
    for _ in range(_MAX_TEMPLATE_DEPTH):
        markup, num_removed = _TEMPLATE.subn("", markup)
        if num_removed == 0:
            break
    for pattern, replacement in _WIKI_STEPS:
        markup = pattern.sub(replacement, markup)
    return markup.strip()


def _parse_line(line: bytes, *, number: int, path: Path) -> Document:
    where = f"{path}:{number}"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{where}: not JSON ({error})") from error
    text = row.get("text", row.get("contents")) if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise CorpusError(f'{where}: expected an object with the string "text" (or "contents")')
    identifier, title = row.get("id", str(number)), row.get("title")
    if not isinstance(identifier, str | int) or not isinstance(title, str | None):
        raise CorpusError(f'{where}: expected "id" as text or a number and "title" as text')
    if title is None:
        title = text.lstrip().partition("\n")[0].strip('"')[:_MAX_TITLE_CHARS]
    return Document(id=str(identifier), title=_clean(title), text=_clean(text))


def _read_text_file(path: Path, *, root: Path) -> Document:
    if path.stat().st_size > MAX_FILE_BYTES:
        raise CorpusError(f"{path}: larger than {MAX_FILE_BYTES} bytes; split it, or make a JSONL corpus of it")
    text = path.read_text(encoding="utf-8", errors="replace")
    title = ""
    if path.suffix.lower() in {".html", ".htm"}:
        title, text = html_text(text)
    else:
        heading = _HEADING.search(text)
        title = heading.group(1).strip() if heading else ""
    return Document(id=path.relative_to(root).as_posix(), title=title[:_MAX_TITLE_CHARS] or path.stem, text=text)


def _read_wiki(path: Path) -> Iterator[Document]:
    with _open(path) as stream:
        events = ElementTree.iterparse(stream, events=("start", "end"))
        try:
            _, root = next(events)
            for event, element in events:
                if event == "end" and _local_name(element.tag) == "page":
                    yield from _wiki_page(element)
                    root.clear()
        except (ElementTree.ParseError, StopIteration) as error:
            raise CorpusError(f"{path}: not a MediaWiki XML dump ({error})") from error


def _wiki_page(page: ElementTree.Element) -> Iterator[Document]:
    values: dict[str, str] = {}
    for element in page.iter():
        values.setdefault(_local_name(element.tag), element.text or "")
    if "redirect" in values or values.get("ns", "0") != "0" or not values.get("text"):
        return
    yield Document(id=values.get("id", ""), title=values.get("title", ""), text=wiki_text(values["text"]))


def _local_name(tag: str) -> str:
    return tag.rpartition("}")[2]


def _open(path: Path) -> IO[bytes]:
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open}
    stream: IO[bytes] = openers.get(path.suffix.lower(), open)(path, "rb")
    return stream


def _clean(text: str) -> str:
    """Text without lone surrogates, which JSON may hold and no database takes."""
    return text.encode("utf-8", "replace").decode("utf-8")


class _HtmlReader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.title: list[str] = []
        self._unseen_depth = 0
        self._in_title = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        del attrs
        self._unseen_depth += tag in _UNSEEN
        self._in_title = tag == "title"
        if tag in _BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in _UNSEEN:
            self._unseen_depth = max(0, self._unseen_depth - 1)
        self._in_title = False
        if tag in _BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title.append(data)
        elif not self._unseen_depth:
            self.parts.append(data)
