"""Reading for people and for resuming: the run, Tasks, Records and their turns."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Final

from agentrl.errors import StoreError
from agentrl.store import codec
from agentrl.store.connection import Database
from agentrl.store.dispatch_documents import dispatch_from_document
from agentrl.store.documents import (
    Document,
    check_format,
    record_from_document,
    settlement_from_document,
    task_from_document,
)
from agentrl.store.indexes import DISPATCH, RECORD, RUN, SPLIT, TASK
from agentrl.store.parts import load_parts
from agentrl.types import SCHEMA_VERSION, DispatchedSamplingTask, GroupSettlement, Record, Task, Turn

_RUN_ID: Final = "run"
_FIRST_WINDOW: Final = timedelta(minutes=1)
_LAST_WINDOW: Final = timedelta(days=3650)
_TURN_CHUNK: Final = 64


class Reader:
    """What people look at, and what a resumed rollout starts from."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def get_run(self) -> Mapping[str, Any] | None:
        """See ReadStore.get_run."""
        document = await self._find_one(RUN, _RUN_ID)
        if document is None:
            return None
        check_format(RUN, document)
        return {key: codec.decode_json_value(value) for key, value in document["run"].items()}

    async def put_run(self, run: Mapping[str, Any]) -> None:
        """See ReadStore.put_run. Top-level keys not named stay as they are."""
        bad = [key for key in run if not key.isidentifier()]
        if bad:
            raise ValueError(f"run key {bad[0]!r}: top-level keys of the Run document must be identifiers")
        fields = {f"run.{key}": codec.encode_json_value(value) for key, value in run.items()}
        update = {"$set": {"schema_version": SCHEMA_VERSION, **fields}}
        runs = self._database.durable(RUN)
        await self._database.run("write the run", lambda: runs.update_one({"_id": _RUN_ID}, update, upsert=True))

    async def get_task(self, task_id: str) -> Task | None:
        """See ReadStore.get_task."""
        document = await self._find_one(TASK, task_id)
        return None if document is None else task_from_document(document)

    async def get_settlement(self, task_id: str) -> GroupSettlement | None:
        """See ReadStore.get_settlement."""
        document = await self._find_one(TASK, task_id)
        if document is None or "settlement" not in document:
            return None
        check_format(TASK, document)
        return settlement_from_document(task_id, document["settlement"])

    async def get_record(self, record_id: str) -> Record | None:
        """See ReadStore.get_record."""
        document = await self._find_one(RECORD, record_id)
        return None if document is None else record_from_document(document)

    async def list_records(self, *, split: str | None, task_id: str | None, limit: int) -> list[Record]:
        """See ReadStore.list_records."""
        if task_id is not None:
            documents = await self._records_of_task(task_id)
        elif split is not None:
            documents = await self._newest_records(split, limit)
        else:
            splits = await self._database.run("list splits", lambda: self._database.durable(SPLIT).find({}).to_list())
            documents = [found for name in splits for found in await self._newest_records(name["_id"], limit)]
        records = [record_from_document(document) for document in documents]
        kept = [record for record in records if split is None or record.split == split]
        return sorted(kept, key=lambda record: (record.started_at, record.id), reverse=True)[:limit]

    async def _records_of_task(self, task_id: str) -> list[Document]:
        task = await self.get_task(task_id)
        if task is None:
            return []
        ids = [f"{task_id}/g{generation}" for generation in range(task.num_generations)]
        records = self._database.durable(RECORD)
        return await self._database.run("list records", lambda: records.find({"_id": {"$in": ids}}).to_list())

    async def _newest_records(self, split: str, limit: int) -> list[Document]:
        """Widening time windows: the embedded server reads every document a query matches, whatever the limit."""
        now = await self._database.server_time()
        window = _FIRST_WINDOW
        while True:
            query = {"split": split, "started_at": {"$gte": now - window}}
            cursor = self._database.durable(RECORD).find(query).sort("started_at", -1).limit(limit)
            found = await self._database.run("list records", cursor.to_list)
            if len(found) >= limit or window >= _LAST_WINDOW:
                return found
            window = min(4 * window, _LAST_WINDOW)

    async def load_turns(self, record: Record) -> list[Turn]:
        """See TaskStore.load_turns."""
        dispatches: dict[str, list[DispatchedSamplingTask]] = {turn_id: [] for turn_id in record.turn_ids}
        for start in range(0, len(record.turn_ids), _TURN_CHUNK):
            chunk = list(record.turn_ids[start : start + _TURN_CHUNK])
            for turn_id, dispatch in await self._database.run("load turns", partial(self._dispatches, chunk)):
                dispatches[turn_id].append(dispatch)
        return [_assemble(turn_id, found) for turn_id, found in dispatches.items()]

    async def _dispatches(self, turn_ids: list[str]) -> list[tuple[str, DispatchedSamplingTask]]:
        documents = await self._database.durable(DISPATCH).find({"turn_id": {"$in": turn_ids}}).to_list()
        parts = await load_parts(self._database, collection=DISPATCH, documents=documents)
        return [
            (document["turn_id"], dispatch_from_document(document, parts=parts.get(document["_id"], ())))
            for document in documents
        ]

    async def _find_one(self, name: str, document_id: str) -> Document | None:
        collection = self._database.durable(name)
        return await self._database.run(f"read {name} {document_id}", lambda: collection.find_one({"_id": document_id}))


def _assemble(turn_id: str, dispatches: list[DispatchedSamplingTask]) -> Turn:
    if not any(dispatch.id == turn_id for dispatch in dispatches):
        raise StoreError(f"turn {turn_id} is committed but its model call is not in the store")
    model, *tools = sorted(dispatches, key=lambda dispatch: dispatch.index)
    return Turn(model=model, tools=tuple(tools))
