"""Reading and writing whole collections as raw BSON, for maintenance: statistics, export, import, keeping a copy.

The embedded server holds a collection in memory while it is read from end to end. These operations are for people at a
prompt, never for a running loop.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from bson.raw_bson import RawBSONDocument
from pymongo.errors import PyMongoError

from agentrl.errors import StoreError
from agentrl.store.connection import Database
from agentrl.store.indexes import (
    ACCOUNT,
    DISPATCH,
    ENGINE_QUARANTINE,
    JOURNAL_BARRIER,
    JUDGE_VERDICT,
    POLICY_VERSION,
    QUARANTINE,
    RECORD,
    RUN,
    SCORE,
    SEQUENCE,
    SERVICE,
    SPLIT,
    TASK,
    TOKEN_PART,
    TOOL_JOURNAL,
    TRAIN_STEP,
    WORKER,
)

SCAN_TIMEOUT_S: Final = 600.0

# What refers to other documents comes before them: a copy of a run that goes on meanwhile holds whatever it names.
COLLECTIONS: Final = (
    *(RUN, SPLIT, POLICY_VERSION, TRAIN_STEP, TASK, SEQUENCE, SCORE, RECORD, DISPATCH, TOOL_JOURNAL, TOKEN_PART),
    *(JUDGE_VERDICT, ACCOUNT, QUARANTINE, ENGINE_QUARANTINE, SERVICE, WORKER, JOURNAL_BARRIER),
)
_LARGE: Final = frozenset({SEQUENCE, DISPATCH, TOOL_JOURNAL, TOKEN_PART})
_LARGE_BATCH: Final = 4  # documents of up to 4 MiB and a bit; a reply is limited to 48 MB
_SMALL_BATCH: Final = 500
_WRITE_BYTES: Final = 8 * 1024 * 1024
_WRITE_DOCUMENTS: Final = 1000

Progress = Callable[[str, int, int], None]
"""(collection, documents so far, bytes so far), called now and then."""


def no_progress(collection: str, num_documents: int, num_bytes: int) -> None:
    """For callers that show nothing."""


@dataclass(slots=True)
class Fingerprint:
    """Number, bytes and content of a set of documents, whatever their order."""

    num_documents: int = 0
    num_bytes: int = 0
    _sum: int = 0

    def add(self, raw: bytes | memoryview) -> None:
        """Count one document in."""
        self.num_documents += 1
        self.num_bytes += len(raw)
        self._sum = (self._sum + int.from_bytes(hashlib.sha256(raw).digest())) % 2**256


async def collection_names(database: Database) -> list[str]:
    """Collections that are there: known ones first, in reading order, then others by name."""
    found = set(await database.run("list collections", database.list_collections))
    return [name for name in COLLECTIONS if name in found] + sorted(found.difference(COLLECTIONS))


async def is_empty(database: Database) -> bool:
    """Whether no collection holds a document."""
    for name in await collection_names(database):
        if await database.run(f"look into {name}", partial(database.durable(name).find_one, {})) is not None:
            return False
    return True


async def read_all(database: Database, name: str) -> AsyncIterator[RawBSONDocument]:
    """Every document of a collection, unordered. Raises StoreError; a cursor that broke cannot be continued."""
    cursor = database.raw(name).find({}, batch_size=_LARGE_BATCH if name in _LARGE else _SMALL_BATCH)
    try:
        async for document in cursor:
            yield document
    except PyMongoError as error:
        raise StoreError(f"read {name} of {database.name} at {database.uri}: {error}; run it again") from error
    finally:
        await cursor.close()


class Writer:
    """Inserts raw documents in batches of bounded size. Ids already there are left alone, so repeating is safe."""

    def __init__(self, database: Database, name: str) -> None:
        self._database = database
        self._name = name
        self._batch: list[RawBSONDocument] = []
        self._num_bytes = 0

    async def add(self, document: RawBSONDocument) -> None:
        """Insert now or with the next batch."""
        size = len(document.raw)
        if self._batch and (len(self._batch) >= _WRITE_DOCUMENTS or self._num_bytes + size > _WRITE_BYTES):
            await self.flush()
        self._batch.append(document)
        self._num_bytes += size

    async def flush(self) -> None:
        """Insert what is waiting; durable when it returns."""
        batch: Sequence[RawBSONDocument] = self._batch
        self._batch, self._num_bytes = [], 0
        if batch:
            collection = self._database.durable(self._name)
            await self._database.run(f"write {self._name}", lambda: self._database.insert_new(collection, batch))


async def copy_database(source: Database, target: Database, *, progress: Progress = no_progress) -> int:
    """Copy every document of one database into another, empty one, and read the copy back. Returns their number.

    Raises StoreError if the copy differs; nothing is ever removed here.
    """
    total = 0
    for name in await collection_names(source):
        original, writer = Fingerprint(), Writer(target, name)
        async for document in read_all(source, name):
            original.add(document.raw)
            await writer.add(document)
            progress(name, original.num_documents, original.num_bytes)
        await writer.flush()
        copied = Fingerprint()
        async for document in read_all(target, name):
            copied.add(document.raw)
        if copied != original:
            raise StoreError(
                f"copy of {name} from {source.name} to {target.name}: {original.num_documents} documents became "
                f"{copied.num_documents}, or some changed; is a process of the run still writing? Nothing was removed"
            )
        total += copied.num_documents
    return total
