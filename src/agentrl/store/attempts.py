"""A failed Record is sampled again: its header starts over as the next attempt, the old one is kept as a fact.

    1. Quarantine {_id: "attempt 1 of <record>", header: the failed header, dispatch_ids: its turns}   inserted once
    2. Record {_id, fence, status: failed, attempt: 1} -> {status: running, attempt: 2, no turns}      compare-and-set

The calls of the old attempt stay where they are: ids of later attempts contain the attempt.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from agentrl.errors import StaleClaimError, StoreError
from agentrl.store.connection import Database
from agentrl.store.documents import Document, record_from_document, record_to_document
from agentrl.store.indexes import RECORD
from agentrl.types import Record, RecordStatus

Quarantine = Callable[[str, Document], Awaitable[None]]


def next_attempt(record: Record) -> Record:
    """The header of a failed Record as its next attempt begins."""
    return Record(
        id=record.id,
        task_id=record.task_id,
        split=record.split,
        generation=record.generation,
        fence=record.fence,
        status=RecordStatus.RUNNING,
        attempt=record.attempt + 1,
        started_at=record.started_at,
    )


def attempt_key(record: Record) -> str:
    """Key in Quarantine of an attempt that was given up."""
    return f"attempt {record.attempt} of {record.id}"


def attempt_reason(record: Record) -> str:
    """Why an attempt was given up, for Quarantine."""
    stopped = "without a reason" if record.stop_reason is None else f"with {record.stop_reason.value}"
    return f"failed {stopped} and was sampled again"


def check_reopening(record: Record, *, header: Record) -> bool:
    """Whether `header` is the next attempt of `record` already, under the same claim.

    Raises StaleClaimError if another claim owns the header, StoreError if it is not the failed attempt `record` is.
    """
    if header.fence != record.fence:
        raise StaleClaimError(f"reopening {record.id}: fence {record.fence} is old, {header.fence} owns it; stop")
    if (header.status, header.attempt) == (RecordStatus.RUNNING, record.attempt + 1):
        return True
    if (header.status, header.attempt) != (RecordStatus.FAILED, record.attempt):
        raise StoreError(
            f"reopening {record.id}: attempt {header.attempt} is {header.status}, not the failed attempt "
            f"{record.attempt}; only a failed attempt is sampled again"
        )
    return False


async def reopen_record(record: Record, *, database: Database, quarantine: Quarantine) -> Record:
    """See TaskStore.reopen_record."""
    header = await _read(record, database=database)
    if check_reopening(record, header=header):
        return header
    entry: Document = {
        "record_id": record.id,
        "reason": attempt_reason(header),
        "header": record_to_document(header),
        "dispatch_ids": list(header.turn_ids),
    }
    await quarantine(attempt_key(header), entry)
    fields = record_to_document(next_attempt(header))
    query = {
        "_id": record.id,
        "fence": record.fence,
        "status": RecordStatus.FAILED.value,
        "attempt": any_spelling(record.attempt),
    }
    headers = database.durable(RECORD)
    await database.run("reopen a record", lambda: headers.update_one(query, {"$set": fields}))
    reopened = await _read(record, database=database)
    if not check_reopening(record, header=reopened):
        raise StoreError(f"reopening {record.id}: the header did not change")
    return reopened


def any_spelling(attempt: int) -> object:
    """A condition on `attempt`; headers from before there were attempts have none and are first ones."""
    return {"$in": [1, None]} if attempt == 1 else attempt


async def _read(record: Record, *, database: Database) -> Record:
    headers = database.durable(RECORD)
    document = await database.run("read a record", lambda: headers.find_one({"_id": record.id}))
    if document is None:
        raise StoreError(f"reopening {record.id}: there is no such record")
    return record_from_document(document)
