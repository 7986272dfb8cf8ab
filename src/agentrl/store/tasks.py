"""Tasks: enqueue, claim, keep alive, give back, settle. The samplers' side of the store, without the turns."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import groupby
from typing import Final

from agentrl.algo.trie import summarise_group
from agentrl.errors import StaleClaimError
from agentrl.protocols import TaskLook
from agentrl.store.claims import ClaimQueue, announce_epochs, at_epoch, pending_again, pending_document
from agentrl.store.connection import Database
from agentrl.store.documents import Document, settlement_to_document, task_from_document
from agentrl.store.indexes import RECORD, TASK
from agentrl.store.sequences import SequenceRows
from agentrl.store.turns import RecordWriter
from agentrl.types import DBRecordData, GroupSettlement, Task, TaskClaim, TaskStatus

_INSERT_CHUNK: Final = 1000
_RENEW_CHUNK: Final = 256
_COUNTED: Final = (TaskStatus.PENDING, TaskStatus.RUNNING, TaskStatus.SETTLED)
_FEW: Final = 256  # Tasks of one status that are looked at one by one
_COUNT_COST_FACTOR: Final = 20.0  # counting may take this fraction of one server thread: 1/20
_PENDING_REUSE_S: Final = 10.0  # of many pending Tasks it only matters that there are some
_LEASE_FIELDS: Final = {"owner": 1, "lease_until": 1}


class TaskQueue:
    """All operations on Tasks of one process."""

    def __init__(self, database: Database, *, records: RecordWriter, rows: SequenceRows, rng: random.Random) -> None:
        self._database = database
        self._records = records
        self._rows = rows
        self._rng = rng
        self._queues: dict[str, ClaimQueue] = {}
        self._counters: dict[tuple[str, TaskStatus], _Counter] = {}

    async def insert(self, tasks: Sequence[Task]) -> int:
        """See TaskStore.insert_tasks."""
        await self._database.run("announce epochs", lambda: announce_epochs(self._database, tasks))
        num_new = 0
        collection = self._database.durable(TASK)
        for start in range(0, len(tasks), _INSERT_CHUNK):
            chunk = {task.id: pending_document(task, rng=self._rng) for task in tasks[start : start + _INSERT_CHUNK]}
            insert = partial(self._database.insert_new, collection, chunk.values())
            present = await self._database.run("insert tasks", insert)
            num_new += len(chunk) - len(present)
            for task_id, document in chunk.items():
                if task_id not in present:
                    self._counter(document["split"], TaskStatus.PENDING).value += 1
        return num_new

    async def enqueue_epoch(self, *, split: str, epoch: int) -> int | None:
        """See TaskStore.enqueue_epoch."""
        collection = self._database.durable(TASK)

        async def of_epoch(number: int) -> list[Document]:
            return await collection.find({"split": split, "epoch": number}).to_list()

        first = await self._database.run("read the first epoch", lambda: of_epoch(0))
        if not first:
            return None
        known = await self._database.run("read an epoch", lambda: of_epoch(epoch))
        if len(known) == len(first):
            return 0
        return await self.insert([at_epoch(task_from_document(document), epoch) for document in first])

    async def claim(self, *, split: str, owner: str, lease_s: float, limit: int) -> list[TaskClaim]:
        """See TaskStore.claim_tasks."""
        queue = self._queues.get(split)
        if queue is None:
            queue = self._queues[split] = ClaimQueue(self._database, split=split, rng=self._rng)
        claims = await queue.claim(owner=owner, lease_s=lease_s, limit=limit)
        self._moved(split, TaskStatus.PENDING, TaskStatus.RUNNING, len(claims))
        return claims

    async def renew(self, claims: Sequence[TaskClaim], *, lease_s: float) -> list[str]:
        """See TaskStore.renew_claims. Not journalled: a renewal lost in a crash only shortens the lease."""
        lost: list[str] = []
        for start in range(0, len(claims), _RENEW_CHUNK):
            chunk = claims[start : start + _RENEW_CHUNK]
            lost += await self._database.run("renew claims", partial(self._renew, chunk, lease_s))
        return lost

    async def _renew(self, claims: Sequence[TaskClaim], lease_s: float) -> list[str]:
        tasks = self._database.relaxed(TASK)
        ids = [claim.task.id for claim in claims]
        lease_until = await self._database.clock.now() + timedelta(seconds=lease_s)
        owners = list({claim.owner for claim in claims})
        query = {"_id": {"$in": ids}, "owner": {"$in": owners}, "status": TaskStatus.RUNNING.value}
        await tasks.update_many(query, {"$set": {"lease_until": lease_until}})
        found = tasks.find({"_id": {"$in": ids}, "status": TaskStatus.RUNNING.value}, {"_id": 1, "owner": 1})
        held = {(document["_id"], document["owner"]) async for document in found}
        return [claim.task.id for claim in claims if (claim.task.id, claim.owner) not in held]

    async def release(self, claim: TaskClaim) -> None:
        """See TaskStore.release_claim."""
        update = pending_again(rng=self._rng)
        tasks = self._database.durable(TASK)
        await self._database.run("release a claim", lambda: tasks.update_one(_held_by(claim), update))
        self._moved(claim.task.split, TaskStatus.RUNNING, TaskStatus.PENDING, 1)

    async def reap(self, *, split: str) -> list[str]:
        """See TaskStore.reap_expired_claims."""
        return await self._reap(
            split, await self._database.run("look for expired claims", lambda: self._expired(split))
        )

    async def look_over(self, *, split: str) -> TaskLook:
        """See TaskStore.look_over_tasks."""
        now = await self._database.run("read the clock", self._database.clock.now)
        running = await self._count(split)
        if running is None:
            reaped = await self.reap(split=split)
        else:
            reaped = await self._reap(split, [task for task in running if task["lease_until"] < now])
        return TaskLook(counts=self._counts(split), reaped=tuple(reaped))

    async def _reap(self, split: str, expired: Sequence[Document]) -> list[str]:
        tasks = self._database.durable(TASK)
        reaped: list[str] = []
        for document in expired:
            # The exact lease in the filter: a renewal that came in between wins.
            query = {key: document[key] for key in ("_id", "owner", "lease_until")}
            update = pending_again(rng=self._rng)
            result = await self._database.run("reap a claim", partial(tasks.update_one, query, update))
            if result.modified_count:
                reaped.append(document["_id"])
        self._moved(split, TaskStatus.RUNNING, TaskStatus.PENDING, len(reaped))
        return reaped

    async def _expired(self, split: str) -> list[Document]:
        now = await self._database.clock.now()
        query = {"split": split, "status": TaskStatus.RUNNING.value, "lease_until": {"$lt": now}}
        return await self._database.durable(TASK).find(query, _LEASE_FIELDS).to_list()

    async def settle(self, claim: TaskClaim, settlement: GroupSettlement, sequences: Sequence[DBRecordData]) -> None:
        """See TaskStore.settle_task. Rows first, then the flip: a crash in between leaves rows a second try finds."""
        state = await self._database.run("settle a task", lambda: self._state(claim))
        if state is TaskStatus.RUNNING:
            await self._rows.insert(sequences)
            state = await self._database.run("settle a task", lambda: self._flip(claim, settlement, sequences))
        if state in {TaskStatus.SETTLED, TaskStatus.CONSUMED}:
            return
        reason = f"fence {claim.fence} is old: another worker took the task over"
        entry = {"task_id": claim.task.id, "reason": reason, "sequence_ids": [sequence.id for sequence in sequences]}
        await self._records.quarantine(f"settlement of {claim.task.id} at fence {claim.fence}", entry)
        raise StaleClaimError(f"settlement of task {claim.task.id}: {reason}; drop it")

    async def _flip(
        self, claim: TaskClaim, settlement: GroupSettlement, sequences: Sequence[DBRecordData]
    ) -> TaskStatus | None:
        update = {
            "$set": {
                "status": TaskStatus.SETTLED.value,
                "lease_until": None,
                "settlement": settlement_to_document(settlement, sequences=summarise_group(sequences)),
                "mean_tool_calls": await self._mean_tool_calls(claim.task),
            },
            "$currentDate": {"settled_at": True},
        }
        if (await self._database.durable(TASK).update_one(_held_by(claim), update)).matched_count:
            self._moved(claim.task.split, TaskStatus.RUNNING, TaskStatus.SETTLED, 1)
            return TaskStatus.SETTLED
        return await self._state(claim)

    async def _state(self, claim: TaskClaim) -> TaskStatus | None:
        """Status of the claimed Task; None if the claim is lost."""
        fields = {"owner": 1, "status": 1, "fence": 1}
        found = await self._database.durable(TASK).find_one({"_id": claim.task.id}, fields)
        if found is None or (found["owner"], found["fence"]) != (claim.owner, claim.fence):
            return None
        return TaskStatus(found["status"])

    async def _mean_tool_calls(self, task: Task) -> float:
        ids = [f"{task.id}/g{generation}" for generation in range(task.num_generations)]
        headers = self._database.durable(RECORD).find({"_id": {"$in": ids}}, {"num_tool_calls": 1})
        counts = [header["num_tool_calls"] async for header in headers]
        return sum(counts) / len(counts) if counts else 0.0

    async def count(self, *, split: str) -> dict[TaskStatus, int]:
        """See TaskStore.count_tasks; CONSUMED is left out.

        Counting n documents costs the embedded server O(n). Counts up to 256 are exact; a larger one is reused, with
        this process's own changes added, until it is 20 times older than it took. Counted in the order of a Task's
        life, which is that of the index, too, for a query that counts few: one that moves on meanwhile is counted
        twice rather than not at all, so admission errs on the safe side.
        """
        await self._count(split)
        return self._counts(split)

    async def _count(self, split: str) -> list[Document] | None:
        """Bring the counters up to date. Returns the running Tasks if few are, else None.

        Neighbours in a Task's life of which there are few share a round trip.
        """
        running: list[Document] | None = None
        for are_few, group in groupby(_COUNTED, key=lambda status: self._counter(split, status).are_few):
            statuses = list(group)
            found = await self._read_few(split, statuses) if are_few else None
            if found is None:
                for status in statuses:
                    if self._counter(split, status).is_due:
                        await self._refresh(self._counter(split, status), split, status)
                continue
            seen = Counter(document["status"] for document in found)
            for status in statuses:
                self._counter(split, status).value = seen[status.value]
            if TaskStatus.RUNNING in statuses:
                running = [document for document in found if document["status"] == TaskStatus.RUNNING]
        return running

    async def _read_few(self, split: str, statuses: Sequence[TaskStatus]) -> list[Document] | None:
        """Status and lease of all Tasks in these statuses; None if there turn out to be too many for that."""
        limit = len(statuses) * _FEW
        query = {"split": split, "status": {"$in": [status.value for status in statuses]}}
        tasks = self._database.durable(TASK)
        found = await self._database.run(
            "count tasks", lambda: tasks.find(query, {"status": 1, **_LEASE_FIELDS}).limit(limit + 1).to_list()
        )
        return None if len(found) > limit else found

    def _counts(self, split: str) -> dict[TaskStatus, int]:
        return {status: self._counter(split, status).value for status in _COUNTED}

    async def _refresh(self, counter: _Counter, split: str, status: TaskStatus) -> None:
        started = time.monotonic()
        query = {"split": split, "status": status.value}
        tasks = self._database.durable(TASK)
        counter.value = await self._database.run("count tasks", lambda: tasks.count_documents(query))
        counter.counted_at = time.monotonic()
        counter.cost_s = counter.counted_at - started

    def _counter(self, split: str, status: TaskStatus) -> _Counter:
        reuse_s = _PENDING_REUSE_S if status is TaskStatus.PENDING else 0.0
        return self._counters.setdefault((split, status), _Counter(reuse_s=reuse_s))

    def _moved(self, split: str, source: TaskStatus, target: TaskStatus, num_tasks: int) -> None:
        self._counter(split, source).value -= num_tasks
        self._counter(split, target).value += num_tasks


@dataclass(slots=True)
class _Counter:
    """The last count of one split and status."""

    reuse_s: float = 0.0  # a large count is at least so long good enough
    value: int = 0
    counted_at: float = float("-inf")
    cost_s: float = 0.0

    @property
    def are_few(self) -> bool:
        return self.value <= _FEW

    @property
    def is_due(self) -> bool:
        age_s = time.monotonic() - self.counted_at
        return self.are_few or age_s > max(self.reuse_s, _COUNT_COST_FACTOR * self.cost_s)


def _held_by(claim: TaskClaim) -> Document:
    return {
        "_id": claim.task.id,
        "owner": claim.owner,
        "fence": claim.fence,
        "status": TaskStatus.RUNNING.value,
    }
