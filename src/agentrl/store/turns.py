"""Records and their turns: opened under a fence, committed turn by turn, finished once.

The commit point of a turn is a compare-and-set on its Record's header; everything else is immutable and written before:

    1. DispatchedSamplingTask documents (and TokenParts)    ids contain the fence; a second insert finds them there
    2. Record {_id, fence, status: running, num_turns: n}   push the model call's id, num_turns n + 1

A header that does not match any more belongs to another claim, or holds the turn already (the reply was lost). Many
rollouts commit at once, so both writes go out in groups. The headers of a group are written relaxed, then one durable
write, the barrier, takes them all to the journal with a single wait, then they are read back: a server that crashed and
came back in between may have lost the relaxed writes without the driver noticing, and only the read tells.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Final

import bson
from bson.raw_bson import RawBSONDocument
from pymongo import UpdateOne
from pymongo.errors import AutoReconnect

from agentrl.errors import StaleClaimError, StoreError
from agentrl.store.attempts import any_spelling
from agentrl.store.connection import Database
from agentrl.store.dispatch_documents import turn_to_documents
from agentrl.store.documents import (
    Document,
    final_record_fields,
    record_from_document,
    record_to_document,
    utc_milliseconds,
)
from agentrl.store.group_commit import GroupCommit
from agentrl.store.indexes import DISPATCH, JOURNAL_BARRIER, QUARANTINE, RECORD, TASK, TOKEN_PART
from agentrl.types import (
    SCHEMA_VERSION,
    DispatchKind,
    Record,
    RecordStatus,
    TaskClaim,
    TaskStatus,
    Turn,
)

MESSAGE_BYTES: Final = 8 * 1024 * 1024
_TAKEN_OVER: Final = [RecordStatus.RUNNING.value, RecordStatus.FAILED.value]  # a failed one may be reopened


class _Outcome(StrEnum):
    DONE = "done"
    STALE = "stale"  # another fence owns the Record
    CONFLICT = "conflict"  # same fence, but the header says something else happened
    LOST = "lost"  # the header is as before: the write did not survive a crash of the server


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeaderWrite:
    """One compare-and-set on a Record header, with the documents it stands on and how to recognise it as done."""

    record_id: str
    fence: int
    attempt: int
    num_turns: int | None  # None: whatever it is
    update: Document
    parts: tuple[RawBSONDocument, ...]
    dispatches: Mapping[str, RawBSONDocument]
    done_when: Document  # fields of the header after the write; "turn_id": contained in turn_ids

    @property
    def operation(self) -> UpdateOne:
        query: Document = {
            "_id": self.record_id,
            "fence": self.fence,
            "status": RecordStatus.RUNNING.value,
            "attempt": any_spelling(self.attempt),
        }
        if self.num_turns is not None:
            query["num_turns"] = self.num_turns
        return UpdateOne(query, self.update)


class RecordWriter:
    """Opens, extends and finishes Records for the claims of one process."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._barrier_id = uuid.uuid4().hex
        self._commits: GroupCommit[_HeaderWrite, _Outcome] = GroupCommit(self._write)

    async def open(self, claim: TaskClaim) -> list[Record]:
        """See TaskStore.open_records."""
        return await self._database.run("open records", lambda: self._open(claim))

    async def _open(self, claim: TaskClaim) -> list[Record]:
        task = claim.task
        query = {
            "_id": task.id,
            "owner": claim.owner,
            "fence": claim.fence,
            "status": TaskStatus.RUNNING.value,
        }
        if await self._database.durable(TASK).find_one(query, {"_id": 1}) is None:
            raise StaleClaimError(f"task {task.id}: the claim with fence {claim.fence} is lost; stop working on it")
        headers = self._database.durable(RECORD)
        ids = [f"{task.id}/g{generation}" for generation in range(task.num_generations)]
        known = {document["_id"]: document async for document in headers.find({"_id": {"$in": ids}})}
        now = utc_milliseconds(await self._database.clock.now())
        missing = [
            record_to_document(
                Record(
                    id=record_id,
                    task_id=task.id,
                    split=task.split,
                    generation=generation,
                    fence=claim.fence,
                    status=RecordStatus.RUNNING,
                    started_at=now,
                )
            )
            for generation, record_id in enumerate(ids)
            if record_id not in known
        ]
        if missing:
            await self._database.insert_new(headers, missing)
        await headers.update_many(
            {"_id": {"$in": ids}, "status": {"$in": _TAKEN_OVER}, "fence": {"$lt": claim.fence}},
            {"$set": {"fence": claim.fence}},
        )
        records = [record_from_document(document) async for document in headers.find({"_id": {"$in": ids}})]
        newer = [record for record in records if record.fence > claim.fence]
        if newer:
            raise StaleClaimError(f"record {newer[0].id} has fence {newer[0].fence}, this claim {claim.fence}: stop")
        return sorted(records, key=lambda record: record.generation)

    async def commit(self, record: Record, turn: Turn) -> Record:
        """See TaskStore.commit_turn."""
        extended = extend_record(record, turn)
        tokens = turn.model.tokens
        encoded = turn_to_documents(turn)
        write = _HeaderWrite(
            record_id=record.id,
            fence=record.fence,
            attempt=record.attempt,
            num_turns=len(record.turn_ids),
            update={
                "$push": {"turn_ids": turn.model.id, "turn_prompt_tokens": extended.turn_prompt_tokens[-1]},
                "$set": {"num_turns": len(extended.turn_ids), "num_prompt_tokens": extended.num_prompt_tokens},
                "$inc": {
                    "num_completion_tokens": 0 if tokens is None else len(tokens.completion_ids),
                    "num_tool_calls": extended.num_tool_calls - record.num_tool_calls,
                    "cost_nano_usd": extended.cost_nano_usd - record.cost_nano_usd,
                },
            },
            parts=tuple(_raw(part) for item in encoded for part in item.parts),
            dispatches={item.document["_id"]: _raw(item.document) for item in encoded},
            done_when={"turn_id": turn.model.id},
        )
        outcome = await self._commits.submit(write)
        if outcome is not _Outcome.DONE:
            ids = [turn.model.id, *(tool.id for tool in turn.tools)]
            await self._refuse(outcome, write, what=f"turn {turn.model.id}", late={"dispatch_ids": ids})
        return extended

    async def finish(self, record: Record) -> None:
        """See TaskStore.finish_record."""
        if not record.is_final or record.stop_reason is None:
            raise ValueError(f"record {record.id} is {record.status} with stop_reason {record.stop_reason}: not final")
        fields = final_record_fields(record)
        write = _HeaderWrite(
            record_id=record.id,
            fence=record.fence,
            attempt=record.attempt,
            num_turns=None,
            update={"$set": {**fields, "finished_at": await self._database.stamp(record.finished_at)}},
            parts=(),
            dispatches={},
            done_when=fields,
        )
        outcome = await self._commits.submit(write)
        if outcome is not _Outcome.DONE:
            await self._refuse(outcome, write, what=f"result of {record.id}", late={"result": fields})

    async def close(self) -> None:
        """Write out what was submitted."""
        await self._commits.close()

    async def _refuse(self, outcome: _Outcome, write: _HeaderWrite, *, what: str, late: Document) -> None:
        if outcome is _Outcome.CONFLICT:
            raise StoreError(
                f"{what}: other content was written before at fence {write.fence} of {write.record_id}; "
                f"a turn is sampled and a record finished once per claim"
            )
        reason = f"fence {write.fence} is old: another worker took the task over"
        await self.quarantine(
            f"{what} at fence {write.fence}", {"record_id": write.record_id, "reason": reason, **late}
        )
        raise StaleClaimError(f"{what}: {reason}; stop working on it")

    async def quarantine(self, key: str, entry: Document) -> None:
        """Log late work. `key` makes a repeated refusal one entry."""
        document = {"_id": key, "schema_version": SCHEMA_VERSION, "at": await self._database.stamp(None), **entry}
        quarantine = self._database.durable(QUARANTINE)
        await self._database.run("log late work", partial(self._database.insert_new, quarantine, [document]))

    # --- the batch ----------------------------------------------------------------------------------------------

    async def _write(self, writes: Sequence[_HeaderWrite]) -> list[_Outcome]:
        return await self._database.run("commit turns", lambda: self._write_once(writes))

    async def _write_once(self, writes: Sequence[_HeaderWrite]) -> list[_Outcome]:
        foreign = await self._insert(writes)
        accepted = [write for write in writes if foreign.isdisjoint(write.dispatches)]
        outcomes = dict(zip(map(id, accepted), await self._update_headers(accepted), strict=True))
        return [outcomes.get(id(write), _Outcome.CONFLICT) for write in writes]

    async def _update_headers(self, writes: Sequence[_HeaderWrite]) -> list[_Outcome]:
        operations = [write.operation for write in writes]
        if len(operations) == 1:
            if (await self._database.durable(RECORD).bulk_write(operations)).matched_count == 1:
                return [_Outcome.DONE]
        elif operations:
            await self._database.relaxed(RECORD).bulk_write(operations, ordered=False)
        barrier = {"$inc": {"num_batches": 1}, "$setOnInsert": {"schema_version": SCHEMA_VERSION}}
        await self._database.durable(JOURNAL_BARRIER).update_one({"_id": self._barrier_id}, barrier, upsert=True)
        return await self._outcomes(writes)

    async def _insert(self, writes: Sequence[_HeaderWrite]) -> set[str]:
        """Insert what the headers stand on. Returns ids that were there with other content."""
        for parts in _parts_in_messages(writes):
            await self._database.insert_new(self._database.durable(TOKEN_PART), parts)
        documents = {key: document for write in writes for key, document in write.dispatches.items()}
        if not documents:
            return set()
        dispatches = self._database.durable(DISPATCH)
        present = await self._database.insert_new(dispatches, documents.values())
        if not present:
            return set()
        found = await dispatches.find({"_id": {"$in": sorted(present)}}).to_list()
        return {document["_id"] for document in found if bson.encode(document) != documents[document["_id"]].raw}

    async def _outcomes(self, writes: Sequence[_HeaderWrite]) -> list[_Outcome]:
        ids = sorted({write.record_id for write in writes})
        headers = {header["_id"]: header async for header in self._database.durable(RECORD).find({"_id": {"$in": ids}})}
        outcomes = [_judge(write, headers.get(write.record_id)) for write in writes]
        if _Outcome.LOST in outcomes:
            raise AutoReconnect("the server restarted between the writes of a batch and its barrier")
        return outcomes


def _parts_in_messages(writes: Sequence[_HeaderWrite]) -> Iterator[list[RawBSONDocument]]:
    """The TokenParts of a batch, each once, in lists well below the message limit."""
    message: list[RawBSONDocument] = []
    num_bytes = 0
    for part in {part["_id"]: part for write in writes for part in write.parts}.values():
        if message and num_bytes + len(part.raw) > MESSAGE_BYTES:
            yield message
            message, num_bytes = [], 0
        message.append(part)
        num_bytes += len(part.raw)
    if message:
        yield message


def _raw(document: Document) -> RawBSONDocument:
    """Encoded by the caller, so that a value BSON refuses fails its own turn and not the batch."""
    return RawBSONDocument(bson.encode(document))


def _judge(write: _HeaderWrite, header: Document | None) -> _Outcome:
    """What became of a write, read from the header afterwards."""
    if header is None:
        return _Outcome.CONFLICT
    turn_id = write.done_when.get("turn_id")
    if turn_id is not None:
        done = turn_id in header["turn_ids"]
    else:
        is_same = (header["fence"], header.get("attempt", 1)) == (write.fence, write.attempt)
        done = is_same and all(header[k] == value for k, value in write.done_when.items())
    if done:
        return _Outcome.DONE
    if header["fence"] != write.fence:
        return _Outcome.STALE
    if header.get("attempt", 1) != write.attempt:
        return _Outcome.CONFLICT
    untouched = header["status"] == RecordStatus.RUNNING and write.num_turns in {None, header["num_turns"]}
    return _Outcome.LOST if untouched else _Outcome.CONFLICT


def extend_record(record: Record, turn: Turn) -> Record:
    """The header after `turn` is committed. Raises ValueError if the turn does not follow the committed ones."""
    if turn.index != len(record.turn_ids) or turn.model.record_id != record.id:
        raise ValueError(f"turn {turn.model.id} has index {turn.index}: {record.id} has {len(record.turn_ids)} turns")
    tokens = turn.model.tokens
    parent_turn = -1 if tokens is None else tokens.parent_turn
    if not -1 <= parent_turn < turn.index:
        raise ValueError(f"turn {turn.model.id} has parent {parent_turn}: only earlier turns and -1 exist")
    parent_tokens = 0 if parent_turn < 0 else record.turn_prompt_tokens[parent_turn]
    prompt_tokens = parent_tokens + (0 if tokens is None else len(tokens.prompt_ids))
    return replace(
        record,
        turn_ids=(*record.turn_ids, turn.model.id),
        turn_prompt_tokens=(*record.turn_prompt_tokens, prompt_tokens),
        num_prompt_tokens=max(record.num_prompt_tokens, prompt_tokens),
        num_completion_tokens=record.num_completion_tokens + (0 if tokens is None else len(tokens.completion_ids)),
        num_tool_calls=record.num_tool_calls + sum(tool.kind is DispatchKind.TOOL for tool in turn.tools),
        cost_nano_usd=record.cost_nano_usd + sum(call.cost_nano_usd for call in (turn.model, *turn.tools)),
    )
