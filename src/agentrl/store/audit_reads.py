"""Reading every fact of a run for an audit: ids first, then documents by id in blocks.

Blocks of ids are the one form that costs every server O(block): the embedded one scans the collection for anything that
pages by range, and a long-lived cursor would not survive a restart of the server. Two lists of ids are the only scans.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from agentrl.errors import StoreError
from agentrl.protocols import QuarantinedWork, TaskState
from agentrl.store.connection import Database
from agentrl.store.dispatch_documents import dispatch_from_document
from agentrl.store.documents import Document, record_from_document, settlement_from_document, task_from_document
from agentrl.store.indexes import DISPATCH, POLICY_VERSION, QUARANTINE, RECORD, SEQUENCE, TASK
from agentrl.store.ledger_documents import policy_from_document, sequence_from_document
from agentrl.store.parts import load_parts
from agentrl.types import (
    DBRecordData,
    DispatchedSamplingTask,
    PolicyVersion,
    Record,
    SequenceSummary,
    TaskStatus,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")

_HEADER_BLOCK: Final = 256
_PAYLOAD_BLOCK: Final = 64
_UNREADABLE: Final = (AttributeError, IndexError, KeyError, TypeError, ValueError, StoreError)


class AuditReader:
    """agentrl.protocols.AuditStore on MongoDB, apart from the ledger and the clock."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def list_ids(self, name: str) -> list[str]:
        """Ids of a collection, sorted: one scan."""
        collection = self._database.durable(name)
        found = await self._database.run(f"list {name}", lambda: collection.find({}, {"_id": 1}).to_list())
        return sorted(str(document["_id"]) for document in found)

    async def find_tasks(self, ids: Sequence[str]) -> list[TaskState]:
        """See AuditStore.find_tasks."""
        return await self._find(TASK, ids, _state_from_document)

    async def find_records(self, ids: Sequence[str]) -> list[Record]:
        """See AuditStore.find_records."""
        return await self._find(RECORD, ids, record_from_document)

    async def find_dispatches(self, turn_ids: Sequence[str]) -> dict[str, list[DispatchedSamplingTask]]:
        """See AuditStore.find_dispatches."""
        calls: dict[str, list[DispatchedSamplingTask]] = {}
        for start in range(0, len(turn_ids), _PAYLOAD_BLOCK):
            query = {"turn_id": {"$in": list(turn_ids[start : start + _PAYLOAD_BLOCK])}}
            documents, parts = await self._with_parts(DISPATCH, query)
            for document in documents:
                calls.setdefault(document["turn_id"], []).extend(
                    _read(DISPATCH, document, partial(_dispatch, parts=parts))
                )
        return {turn_id: sorted(found, key=lambda call: call.index) for turn_id, found in calls.items()}

    async def find_sequences(self, ids: Sequence[str]) -> list[DBRecordData]:
        """See AuditStore.find_sequences."""
        rows: list[DBRecordData] = []
        for start in range(0, len(ids), _PAYLOAD_BLOCK):
            query = {"_id": {"$in": list(ids[start : start + _PAYLOAD_BLOCK])}}
            documents, parts = await self._with_parts(SEQUENCE, query)
            rows += [
                row for document in documents for row in _read(SEQUENCE, document, partial(_sequence, parts=parts))
            ]
        return rows

    async def list_policies(self) -> list[PolicyVersion]:
        """See AuditStore.list_policies."""
        return sorted(await self._all(POLICY_VERSION, policy_from_document), key=lambda policy: policy.version)

    async def list_quarantined(self) -> list[QuarantinedWork]:
        """See AuditStore.list_quarantined."""
        return sorted(await self._all(QUARANTINE, _quarantined_from_document), key=lambda work: work.key)

    async def _find(self, name: str, ids: Sequence[str], build: Callable[[Document], T]) -> list[T]:
        found: list[T] = []
        for start in range(0, len(ids), _HEADER_BLOCK):
            documents = await self._documents(name, {"_id": {"$in": list(ids[start : start + _HEADER_BLOCK])}})
            found += [value for document in documents for value in _read(name, document, build)]
        return found

    async def _all(self, name: str, build: Callable[[Document], T]) -> list[T]:
        documents = await self._documents(name, {})
        return [value for document in documents for value in _read(name, document, build)]

    async def _documents(self, name: str, query: Document) -> list[Document]:
        collection = self._database.durable(name)
        return await self._database.run(f"read {name}", lambda: collection.find(query).to_list())

    async def _with_parts(self, name: str, query: Document) -> tuple[list[Document], Mapping[str, Sequence[bytes]]]:
        async def read() -> tuple[list[Document], Mapping[str, Sequence[bytes]]]:
            documents = await self._database.durable(name).find(query).to_list()
            return documents, await load_parts(self._database, collection=name, documents=documents)

        return await self._database.run(f"read {name}", read)


def _read(name: str, document: Document, build: Callable[[Document], T]) -> list[T]:
    """The value a document holds, as a list of one; none if it cannot be read."""
    try:
        return [build(document)]
    except _UNREADABLE as error:
        logger.warning("%s %s cannot be read: %s: %s", name, document.get("_id"), type(error).__name__, error)
        return []


def _dispatch(document: Document, *, parts: Mapping[str, Sequence[bytes]]) -> DispatchedSamplingTask:
    return dispatch_from_document(document, parts=parts.get(document["_id"], ()))


def _sequence(document: Document, *, parts: Mapping[str, Sequence[bytes]]) -> DBRecordData:
    return sequence_from_document(document, parts=parts.get(document["_id"], ()))


def _state_from_document(document: Document) -> TaskState:
    settlement: Mapping[str, Any] | None = document.get("settlement")
    return TaskState(
        task=task_from_document(document),
        status=TaskStatus(document["status"]),
        fence=document["fence"],
        lease_until=document["lease_until"],
        settlement=None if settlement is None else settlement_from_document(document["_id"], settlement),
        sequences=() if settlement is None else tuple(SequenceSummary(**row) for row in settlement["sequences"]),
        consumed_step=document.get("consumed_step"),
        drop_reason=document.get("drop_reason"),
        settled_at=document.get("settled_at"),
    )


def _quarantined_from_document(document: Document) -> QuarantinedWork:
    ids = [*document.get("dispatch_ids", ()), *document.get("sequence_ids", ())]
    if "result" in document:
        ids.append(document["record_id"])
    return QuarantinedWork(key=str(document["_id"]), reason=document["reason"], ids=tuple(ids))
