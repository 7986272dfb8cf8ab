"""A Record starts over: its header begins the next attempt, the old one is kept as a fact.

    1. Quarantine {_id: "attempt 1 of <record>", reason, header: the old one, dispatch_ids: its turns}    inserted once
    2. Record {_id, fence, status, attempt: 1} -> {status: running, attempt: 2, no turns}               compare-and-set

A failed one does so to be sampled again, a running one whose sampler died when it cannot be continued elsewhere.

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
    """The header of a Record as its next attempt begins."""
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


def failure_reason(record: Record) -> str:
    """Why a failed attempt was given up, for Quarantine."""
    stopped = "without a reason" if record.stop_reason is None else f"with {record.stop_reason.value}"
    return f"failed {stopped} and was sampled again"


def has_begun(record: Record, *, header: Record, given_up: RecordStatus) -> bool:
    """Whether `header` is the next attempt of `record` already, under the same claim.

    `given_up` is the status the old attempt must have. Raises StaleClaimError if another claim owns the header,
    StoreError if it is not such an attempt.
    """
    if header.fence != record.fence:
        raise StaleClaimError(f"starting {record.id} over: fence {record.fence} is old, {header.fence} owns it; stop")
    if (header.status, header.attempt) == (RecordStatus.RUNNING, record.attempt + 1):
        return True
    if (header.status, header.attempt) != (given_up, record.attempt):
        rule = "sampled again" if given_up is RecordStatus.FAILED else "restarted"
        raise StoreError(
            f"starting {record.id} over: attempt {header.attempt} is {header.status}, not the {given_up} attempt "
            f"{record.attempt}; only a {given_up} attempt is {rule}"
        )
    return False


async def reopen_record(record: Record, *, database: Database, quarantine: Quarantine) -> Record:
    """See TaskStore.reopen_record."""
    return await _start_over(
        record, given_up=RecordStatus.FAILED, reason=failure_reason, database=database, quarantine=quarantine
    )


async def restart_record(record: Record, *, reason: str, database: Database, quarantine: Quarantine) -> Record:
    """See TaskStore.restart_record."""
    return await _start_over(
        record, given_up=RecordStatus.RUNNING, reason=lambda header: reason, database=database, quarantine=quarantine
    )


async def _start_over(
    record: Record,
    *,
    given_up: RecordStatus,
    reason: Callable[[Record], str],
    database: Database,
    quarantine: Quarantine,
) -> Record:
    header = await _read(record, database=database)
    if has_begun(record, header=header, given_up=given_up):
        return header
    entry: Document = {
        "record_id": record.id,
        "reason": reason(header),
        "header": record_to_document(header),
        "dispatch_ids": list(header.turn_ids),
    }
    await quarantine(attempt_key(header), entry)
    fields = record_to_document(next_attempt(header))
    query = {
        "_id": record.id,
        "fence": record.fence,
        "status": given_up.value,
        "attempt": any_spelling(record.attempt),
    }
    headers = database.durable(RECORD)
    await database.run("start a record over", lambda: headers.update_one(query, {"$set": fields}))
    begun = await _read(record, database=database)
    if not has_begun(record, header=begun, given_up=given_up):
        raise StoreError(f"starting {record.id} over: the header did not change")
    return begun


def any_spelling(attempt: int) -> object:
    """A condition on `attempt`; headers from before there were attempts have none and are first ones."""
    return {"$in": [1, None]} if attempt == 1 else attempt


async def _read(record: Record, *, database: Database) -> Record:
    headers = database.durable(RECORD)
    document = await database.run("read a record", lambda: headers.find_one({"_id": record.id}))
    if document is None:
        raise StoreError(f"starting {record.id} over: there is no such record")
    return record_from_document(document)
