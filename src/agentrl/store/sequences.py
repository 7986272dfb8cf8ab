"""DBRecordData rows: written once, read by id in order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Final

from agentrl.errors import StoreError
from agentrl.store.connection import Database
from agentrl.store.documents import Encoded
from agentrl.store.indexes import SEQUENCE, TOKEN_PART
from agentrl.store.ledger_documents import sequence_from_document, sequence_to_document
from agentrl.store.parts import load_parts
from agentrl.types import DBRecordData

_INSERT_CHUNK: Final = 2000
_LOAD_CHUNK: Final = 128


class SequenceRows:
    """The rows of one run."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def insert(self, sequences: Sequence[DBRecordData]) -> int:
        """Add rows; ids already there are left alone. Returns how many are new."""
        num_new = 0
        for start in range(0, len(sequences), _INSERT_CHUNK):
            encoded = [sequence_to_document(row) for row in sequences[start : start + _INSERT_CHUNK]]
            num_new += await self._database.run("insert sequences", partial(self._insert, encoded))
            await asyncio.sleep(0)
        return num_new

    async def _insert(self, encoded: Sequence[Encoded]) -> int:
        for part in (part for item in encoded for part in item.parts):
            await self._database.insert_new(self._database.durable(TOKEN_PART), [part])
        documents = [item.document for item in encoded]
        present = await self._database.insert_new(self._database.durable(SEQUENCE), documents)
        return len(documents) - len(present)

    async def load(self, ids: Sequence[str]) -> list[DBRecordData]:
        """Rows in the order of `ids`. Raises StoreError naming a missing one."""
        rows: dict[str, DBRecordData] = {}
        for start in range(0, len(ids), _LOAD_CHUNK):
            chunk = list(ids[start : start + _LOAD_CHUNK])
            for row in await self._database.run("load sequences", partial(self._load, chunk)):
                rows[row.id] = row
        missing = [row_id for row_id in ids if row_id not in rows]
        if missing:
            raise StoreError(f"sequence {missing[0]} is not in the store ({len(missing)} of {len(ids)} missing)")
        return [rows[row_id] for row_id in ids]

    async def _load(self, ids: list[str]) -> list[DBRecordData]:
        documents = await self._database.durable(SEQUENCE).find({"_id": {"$in": ids}}).to_list()
        parts = await load_parts(self._database, collection=SEQUENCE, documents=documents)
        return [sequence_from_document(document, parts=parts.get(document["_id"], ())) for document in documents]

    async def list(self, *, split: str) -> list[str]:
        """Ids of all rows of a split, sorted."""
        rows = self._database.durable(SEQUENCE)
        found = await self._database.run("list sequences", lambda: rows.find({"split": split}, {"_id": 1}).to_list())
        return sorted(document["_id"] for document in found)
