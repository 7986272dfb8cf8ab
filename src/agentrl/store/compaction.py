"""Removing what a crash or a lost claim left behind and nothing can ever refer to: `agentrl db compact`.

    late or half-written dispatches      of a Task settled for an hour, in no Record's turn_ids: the Records are final
    TokenParts                           of such a Task that neither a dispatch nor a row names

A Task that is not settled is left alone, and so is what a Quarantine entry keeps for another reason than a lost claim.
Only what can never change again is judged, so a run may go on meanwhile. Dispatches go before their parts, so breaking
off is harmless. The entries in Quarantine stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final

from agentrl.store.connection import Database
from agentrl.store.dispatch_documents import PROMPT
from agentrl.store.dispatch_fields import implied_place
from agentrl.store.documents import Document
from agentrl.store.indexes import DISPATCH, QUARANTINE, RECORD, SEQUENCE, TASK, TOKEN_PART
from agentrl.store.parts import all_part_ids
from agentrl.store.scan import Progress, no_progress
from agentrl.types import DispatchKind, RecordStatus, TaskStatus

MIN_AGE: Final = timedelta(hours=1)
_SETTLED: Final = frozenset({TaskStatus.SETTLED.value, TaskStatus.CONSUMED.value})
_CHUNK: Final = 64
_LOST_CLAIM: Final = "fence "  # how a Quarantine entry about late work gives its reason
_TASK_OF: Final[Mapping[str, re.Pattern[str]]] = {
    DISPATCH: re.compile(r"(?P<task>.+)/g\d+/(\d+|judge)\.[\d.a-z]+(/\d+)?#\d+", re.DOTALL),
    SEQUENCE: re.compile(r"(?P<task>.+)/g\d+/s\d+#\d+", re.DOTALL),
    PROMPT: re.compile(r"(?P<task>.+):[0-9a-f]{64}#\d+", re.DOTALL),
}


@dataclass(slots=True)
class Orphans:
    """What may be removed. `num_bytes` as BSON."""

    dispatch_ids: list[str] = field(default_factory=list)
    part_ids: list[str] = field(default_factory=list)
    num_bytes: int = 0


async def find_orphans(
    database: Database, *, older_than: timedelta = MIN_AGE, progress: Progress = no_progress
) -> Orphans:
    """Look for what nothing refers to. Changes nothing."""
    before = await database.server_time() - older_than
    tasks = await _settled_tasks(database, before)
    kept = await _quarantined_for_good(database)
    orphans = Orphans()
    part_ids: set[str] = set()  # that something names
    unfinished: set[str] = set()
    for number, (task_id, num_generations) in enumerate(tasks.items(), start=1):
        committed = await _committed_turns(database, task_id, num_generations)
        if committed is None:
            unfinished.add(task_id)
            continue
        for document in await _dispatches(database, task_id):
            is_named = document["turn_id"] in committed or not kept.isdisjoint({document["_id"], document["turn_id"]})
            is_named = is_named or document["kind"] == DispatchKind.JUDGE.value  # of the Record, not of a turn
            if is_named or document["finished_at"] >= before:
                part_ids.update(all_part_ids(DISPATCH, document))
            else:
                orphans.dispatch_ids.append(document["_id"])
        progress(TASK, number, 0)
    await _find_parts(database, orphans, task_ids=tasks.keys() - unfinished, named=part_ids)
    orphans.num_bytes = await _num_bytes(database, DISPATCH, orphans.dispatch_ids)
    orphans.num_bytes += await _num_bytes(database, TOKEN_PART, orphans.part_ids)
    return orphans


async def remove(database: Database, orphans: Orphans) -> int:
    """Remove what `find_orphans` found. Returns how many documents that were."""
    num_removed = 0
    for name, ids in ((DISPATCH, orphans.dispatch_ids), (TOKEN_PART, orphans.part_ids)):
        for chunk in _chunks(ids):
            delete = partial(database.durable(name).delete_many, {"_id": {"$in": chunk}})
            num_removed += (await database.run(f"remove from {name}", delete)).deleted_count
    return num_removed


async def _settled_tasks(database: Database, before: datetime) -> dict[str, int]:
    """num_generations of the Tasks whose groups are complete and were so at `before`."""
    fields = {"status": 1, "settled_at": 1, "num_generations": 1}
    found = await database.run("list tasks", lambda: database.durable(TASK).find({}, fields).to_list())
    return {
        task["_id"]: task["num_generations"]
        for task in found
        if task["status"] in _SETTLED and task["settled_at"] is not None and task["settled_at"] < before
    }


async def _committed_turns(database: Database, task_id: str, num_generations: int) -> set[str] | None:
    """Turns of the group's Records; None while one of them is not final."""
    ids = [f"{task_id}/g{generation}" for generation in range(num_generations)]
    query, fields = {"_id": {"$in": ids}}, {"turn_ids": 1, "status": 1}
    records = await database.run("read records", lambda: database.durable(RECORD).find(query, fields).to_list())
    if any(record["status"] == RecordStatus.RUNNING.value for record in records):
        return None
    return {turn_id for record in records for turn_id in record["turn_ids"]}


async def _dispatches(database: Database, task_id: str) -> list[Document]:
    """Every dispatch ever written for a Task, without its contents; turn ids begin with the Task's id and a slash."""
    query = {"turn_id": {"$gte": f"{task_id}/", "$lt": f"{task_id}0"}}  # "0" follows "/"
    fields = {"turn_id": 1, "task_id": 1, "kind": 1, "finished_at": 1, "payload.num_parts": 1, "tokens.prompt": 1}
    dispatches = database.durable(DISPATCH)
    found = await database.run("list dispatches", lambda: dispatches.find(query, fields).to_list())
    return [document for document in found if _place(document)["task_id"] == task_id]


def _place(document: Document) -> Document:
    return {**implied_place(document["_id"], turn_id=document["turn_id"]), **document}


async def _quarantined_for_good(database: Database) -> set[str]:
    """Ids in Quarantine entries that are not about late work."""
    quarantine = database.durable(QUARANTINE)
    entries = await database.run("read the quarantine", lambda: quarantine.find({}).to_list())
    kept = [entry for entry in entries if not str(entry.get("reason")).startswith(_LOST_CLAIM)]
    return set(_strings(kept))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


async def _find_parts(database: Database, orphans: Orphans, *, task_ids: Set[str], named: Set[str]) -> None:
    parts = database.durable(TOKEN_PART)
    found = await database.run("list parts", lambda: parts.find({}, {"_id": 1}).to_list())
    ids = [part["_id"] for part in found if _task_of(part["_id"]) in task_ids and part["_id"] not in named]
    rows = [part_id for part_id in ids if part_id.startswith(f"{SEQUENCE}:")]
    named_by_rows = await _parts_of_rows(database, rows)
    orphans.part_ids = [part_id for part_id in ids if part_id not in named_by_rows]


def _task_of(part_id: str) -> str | None:
    owner, _, rest = part_id.partition(":")
    pattern = _TASK_OF.get(owner)
    match = pattern.fullmatch(rest) if pattern is not None else None
    return None if match is None else match["task"]


async def _parts_of_rows(database: Database, part_ids: Iterable[str]) -> set[str]:
    """Parts that the rows among the owners of `part_ids` name."""
    row_ids = sorted({part_id.partition(":")[2].rpartition("#")[0] for part_id in part_ids})
    named: set[str] = set()
    for chunk in _chunks(row_ids):
        query, fields = {"_id": {"$in": chunk}}, {"payload.num_parts": 1}
        read = partial(_read, database, SEQUENCE, query, fields)
        for row in await database.run("read rows", read):
            named.update(all_part_ids(SEQUENCE, row))
    return named


async def _num_bytes(database: Database, name: str, ids: list[str]) -> int:
    total = 0
    for document_id in ids:
        find = partial(database.raw(name).find_one, {"_id": document_id})
        document = await database.run(f"measure {name}", find)
        total += 0 if document is None else len(document.raw)
    return total


async def _read(database: Database, name: str, query: Document, fields: Document) -> list[Document]:
    return await database.durable(name).find(query, fields).to_list()


def _chunks(ids: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(ids), _CHUNK):
        yield ids[start : start + _CHUNK]
