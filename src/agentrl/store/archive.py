"""A run as one file, and back: `agentrl db export` and `agentrl db import`.

    {"agentrl_export": 1, "schema_version": 2, "run": "demo", "exported_at": ...}
    {"collection": "Task", "document": {"_id": "train:0:q1", ...}}    canonical Extended JSON of MongoDB: types survive
    {"collection": "TrainStep", "bson": "<base64>"}                   where JSON would lose a bit (odd NaNs)
    ...
    {"end": true, "counts": {"Task": 8, ...}, "sha256": "<of all lines before>"}

Documents come back bit for bit. TokenParts that no document names are left out. The file appears under its name when it
is complete; an import reads it twice and writes nothing until the last line has been checked.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

import bson
from bson import json_util
from bson.codec_options import CodecOptions
from bson.errors import BSONError
from bson.json_util import CANONICAL_JSON_OPTIONS
from bson.raw_bson import RawBSONDocument

from agentrl.errors import ArchiveError, StoreError
from agentrl.store.connection import Database
from agentrl.store.documents import READABLE_SCHEMA_VERSIONS, Document
from agentrl.store.indexes import DISPATCH, IMPORT, SEQUENCE, TOKEN_PART, TOOL_JOURNAL
from agentrl.store.parts import all_part_ids
from agentrl.store.scan import Fingerprint, Progress, Writer, collection_names, is_empty, no_progress, read_all
from agentrl.types import SCHEMA_VERSION

FORMAT: Final = 1
_LONGEST_LINE: Final = 256 * 1024 * 1024
_UNDECODED: Final[CodecOptions[Any]] = CodecOptions(datetime_conversion=bson.DatetimeConversion.DATETIME_MS)
_OPTIONS: Final = CANONICAL_JSON_OPTIONS.with_options(datetime_conversion=bson.DatetimeConversion.DATETIME_MS)


@dataclass(slots=True)
class Contents:
    """What an export file holds."""

    run: str
    counts: dict[str, int] = field(default_factory=dict)
    num_bytes: int = 0
    sha256: str = ""


# --- export -------------------------------------------------------------------------------------------------------


async def export_run(database: Database, path: Path, *, progress: Progress = no_progress) -> Contents:
    """Write the database to `path`, replacing it in one go. The run may go on meanwhile.

    Raises ArchiveError if the file cannot be written; nothing is left of it then.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("wb") as file:
            contents = await _write_file(database, file, progress)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        raise ArchiveError(f"{path}: cannot be written ({error.strerror}); choose another place") from error
    finally:
        with suppress(OSError):
            beside.unlink()
    return contents


async def _write_file(database: Database, file: IO[bytes], progress: Progress) -> Contents:
    digest = hashlib.sha256()
    contents = Contents(run=database.name)

    def write(line: Mapping[str, Any] | str) -> None:
        text = line if isinstance(line, str) else json.dumps(line, separators=(",", ":"))
        data = text.encode("ascii") + b"\n"
        digest.update(data)
        file.write(data)

    now = datetime.now(UTC).isoformat(timespec="seconds")
    write({"agentrl_export": FORMAT, "schema_version": SCHEMA_VERSION, "run": database.name, "exported_at": now})
    part_ids: dict[str, None] = {}
    for name in await collection_names(database):
        if name == IMPORT:
            continue
        documents = _parts(database, part_ids) if name == TOKEN_PART else read_all(database, name)
        seen = Fingerprint()
        async for document in documents:
            seen.add(document.raw)
            if name in {SEQUENCE, DISPATCH, TOOL_JOURNAL}:
                part_ids.update(dict.fromkeys(all_part_ids(name, document)))
            write(_entry(name, document.raw))
            progress(name, seen.num_documents, seen.num_bytes)
        contents.counts[name] = seen.num_documents
        contents.num_bytes += seen.num_bytes
    contents.sha256 = digest.hexdigest()
    write({"end": True, "counts": contents.counts, "sha256": contents.sha256})
    return contents


async def _parts(database: Database, part_ids: Mapping[str, None]) -> AsyncIterator[RawBSONDocument]:
    for part_id in part_ids:
        part = await database.run(f"read part {part_id}", partial(database.raw(TOKEN_PART).find_one, {"_id": part_id}))
        if part is None:
            raise StoreError(f"part {part_id} is named by a document of {database.name} but is not there")
        yield part


def _entry(name: str, raw: bytes | memoryview) -> str:
    entry = {"collection": name, "document": bson.decode(raw, _UNDECODED)}
    text = json_util.dumps(entry, json_options=_OPTIONS, separators=(",", ":"))
    if bson.encode(json_util.loads(text, json_options=_OPTIONS)["document"]) == raw:
        return text
    return json.dumps({"collection": name, "bson": base64.b64encode(raw).decode("ascii")})


# --- import -------------------------------------------------------------------------------------------------------


def check_file(path: Path) -> Contents:
    """Read a whole export file. Raises ArchiveError for anything but a complete, unaltered file of a known format."""
    digest = hashlib.sha256()
    counts: Counter[str] = Counter()
    contents: Contents | None = None
    try:
        with path.open("rb") as file:
            for number, line in enumerate(_lines(file, path), start=1):
                entry = _parse(line, path=path, number=number)
                if contents is None:
                    contents = _header(entry, path=path)
                elif "end" in entry:
                    _check_end(entry, counts=counts, sha256=digest.hexdigest(), rest=file.read(1), path=path)
                    contents.counts, contents.sha256 = dict(counts), entry["sha256"]
                    return contents
                else:
                    name, raw = _document(entry, path=path, number=number)
                    counts[name] += 1
                    contents.num_bytes += len(raw)
                digest.update(line)
    except OSError as error:
        raise ArchiveError(f"{path}: cannot be read ({error.strerror})") from error
    raise ArchiveError(f"{path}: it breaks off after {sum(counts.values())} documents; export it again")


async def import_run(
    database: Database, path: Path, contents: Contents, *, progress: Progress = no_progress
) -> Contents:
    """Write the documents of a checked file into an empty database. Repeating an import that broke off completes it.

    Raises ArchiveError if the database holds something else, or the file has changed since it was checked.
    """
    marker = {"_id": "import", "schema_version": SCHEMA_VERSION, "sha256": contents.sha256}
    imports = database.durable(IMPORT)
    begun = await database.run("look for an import", lambda: imports.find_one({"_id": "import"}))
    if begun is None and not await is_empty(database):
        raise ArchiveError(f"run {database.name} holds documents already; import as another run: --as RUN")
    if begun is not None and begun["sha256"] != contents.sha256:
        raise ArchiveError(f"run {database.name} holds part of another file; finish that import or choose --as RUN")
    await database.run("begin an import", lambda: database.insert_new(imports, [marker]))
    await _write_documents(database, path, contents, progress)
    await database.create_indexes()
    await database.drop_collection(IMPORT)
    return contents


async def _write_documents(database: Database, path: Path, contents: Contents, progress: Progress) -> None:
    digest = hashlib.sha256()
    writers: dict[str, Writer] = {}
    seen = Fingerprint()
    with path.open("rb") as file:
        for number, line in enumerate(_lines(file, path), start=1):
            entry = _parse(line, path=path, number=number)
            if "end" in entry:
                break
            digest.update(line)
            if number == 1:
                continue
            name, raw = _document(entry, path=path, number=number)
            writer = writers.setdefault(name, Writer(database, name))
            await writer.add(RawBSONDocument(raw))
            seen.num_documents += 1
            seen.num_bytes += len(raw)
            progress(name, seen.num_documents, seen.num_bytes)
    for writer in writers.values():
        await writer.flush()
    if digest.hexdigest() != contents.sha256:
        raise ArchiveError(f"{path}: it changed during the import; import it again once it is at rest")


def _lines(file: IO[bytes], path: Path) -> Iterator[bytes]:
    while line := file.readline(_LONGEST_LINE):
        if not line.endswith(b"\n"):
            raise ArchiveError(f"{path}: it breaks off in the middle of a line; export it again")
        yield line


def _parse(line: bytes, *, path: Path, number: int) -> Document:
    try:
        entry = json_util.loads(line, json_options=_OPTIONS)
    except (ValueError, TypeError, KeyError, BSONError) as error:
        raise ArchiveError(f"{path}, line {number}: no JSON ({error}); the file was altered") from error
    if not isinstance(entry, dict):
        raise ArchiveError(f"{path}, line {number}: not an object; the file was altered")
    return entry


def _header(entry: Document, *, path: Path) -> Contents:
    if "agentrl_export" not in entry:
        raise ArchiveError(f"{path}: not made by `agentrl db export`")
    versions = (entry["agentrl_export"], entry.get("schema_version"))
    if versions[0] != FORMAT or versions[1] not in READABLE_SCHEMA_VERSIONS:
        readable = " or ".join(map(str, READABLE_SCHEMA_VERSIONS))
        raise ArchiveError(
            f"{path}: format {versions[0]}, schema_version {versions[1]}; this version of agentrl reads "
            f"format {FORMAT}, schema_version {readable}"
        )
    return Contents(run=str(entry.get("run", "")))


def _document(entry: Document, *, path: Path, number: int) -> tuple[str, bytes]:
    try:
        name: str = entry["collection"]
        raw = base64.b64decode(entry["bson"], validate=True) if "bson" in entry else bson.encode(entry["document"])
    except (KeyError, TypeError, ValueError, BSONError) as error:
        raise ArchiveError(f"{path}, line {number}: no document ({error!r}); the file was altered") from error
    return name, raw


def _check_end(entry: Document, *, counts: Counter[str], sha256: str, rest: bytes, path: Path) -> None:
    if entry.get("sha256") != sha256:
        raise ArchiveError(f"{path}: the checksum does not match; the file was altered, export it again")
    stated = {name: count for name, count in entry.get("counts", {}).items() if count}
    if rest or stated != dict(counts):
        raise ArchiveError(f"{path}: it does not hold what its last line says; the file was altered, export it again")
