"""How Tasks are claimed: a bounded probe of random slots through an index, then compare-and-set with an owner token.

Each pending Task has a slot, `epoch * 2^31 + random`. A claimer reads the few Tasks in a random slot range of the
lowest epoch and takes them by `{_id, status: pending}`. Cost does not grow with the queue, claimers rarely meet, and a
unique owner token makes a claim whose reply was lost recognisable. The width follows the density of pending slots.

A Task that was given back has a slot below 0 and is claimed before all others, in one look that is empty most of the
time: its turns age while it waits, and behind a long queue its recovery would take as long as that.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Final

from agentrl.store.connection import Database
from agentrl.store.documents import Document, claim_from_document, task_to_document
from agentrl.store.indexes import SPLIT, TASK
from agentrl.types import SCHEMA_VERSION, Task, TaskClaim, TaskStatus

SLOTS_PER_EPOCH: Final = 2**31
_TARGET_CANDIDATES: Final = 12
_EPOCHS_REFRESH_S: Final = 2.0
_FIRST_WIDTH: Final = SLOTS_PER_EPOCH // 256


class ClaimQueue:
    """Pending Tasks of one split: given-back ones, then lowest epoch first. One per process: it learns where."""

    def __init__(self, database: Database, *, split: str, rng: random.Random) -> None:
        self._database = database
        self._tasks = database.durable(TASK)
        self._split = split
        self._rng = rng
        self._width = _FIRST_WIDTH
        self._floor = 0  # below this epoch nothing was pending when last looked
        self._epochs: list[int] = []
        self._epochs_read_at = float("-inf")

    async def claim(self, *, owner: str, lease_s: float, limit: int) -> list[TaskClaim]:
        """Take up to `limit` Tasks; empty only if nothing is pending."""
        token = f"{owner}:{uuid.uuid4().hex}"
        claims: list[TaskClaim] = []
        while len(claims) < limit:
            wanted = limit - len(claims)
            candidates = await self._database.run("look for pending tasks", partial(self._candidates, wanted))
            if not candidates:
                break
            take = partial(self._take, candidates[:wanted], token, lease_s)
            claims += await self._database.run("claim tasks", take)
        return claims

    async def _take(self, ids: list[str], token: str, lease_s: float) -> list[TaskClaim]:
        lease_until = await self._database.clock.now() + timedelta(seconds=lease_s)
        await self._tasks.update_many(
            {"_id": {"$in": ids}, "status": TaskStatus.PENDING.value},
            {
                "$set": {"status": TaskStatus.RUNNING.value, "owner": token, "lease_until": lease_until},
                "$inc": {"fence": 1, "attempt": 1},
            },
        )
        mine = self._tasks.find({"_id": {"$in": ids}, "owner": token})
        return [claim_from_document(document) async for document in mine]

    async def _candidates(self, wanted: int) -> list[str]:
        """Ids of pending Tasks, in random order: given back, else of the lowest epoch that has any."""
        await self._read_epochs(max_age_s=_EPOCHS_REFRESH_S)
        returned = await self._given_back(wanted)
        if returned:
            return returned
        found = await self._first_pending(wanted)
        if found:
            return found
        await self._read_epochs(max_age_s=0.0)
        return await self._first_pending(wanted)

    async def _given_back(self, wanted: int) -> list[str]:
        """Tasks given back, else those of epochs already passed: one range over all of them, mostly empty."""
        found = await self._pending(-SLOTS_PER_EPOCH, self._floor * SLOTS_PER_EPOCH, 4 * wanted)
        again = [document for document in found if document["slot"] < 0]
        if again or not found:
            return self._shuffled(again)
        self._floor = min(document["epoch"] for document in found)
        return self._shuffled([document for document in found if document["epoch"] == self._floor])

    async def _first_pending(self, wanted: int) -> list[str]:
        for epoch in self._epochs:
            if epoch < self._floor:
                continue
            found = await self._probe(epoch, wanted)
            if found:
                self._floor = epoch
                return self._shuffled(found)
        return []

    async def _read_epochs(self, *, max_age_s: float) -> None:
        if time.monotonic() - self._epochs_read_at < max_age_s:
            return
        document = await self._database.durable(SPLIT).find_one({"_id": self._split})
        self._epochs = sorted(document["epochs"]) if document else []
        self._epochs_read_at = time.monotonic()

    async def _probe(self, epoch: int, wanted: int) -> list[Document]:
        target = max(_TARGET_CANDIDATES, 2 * wanted)
        width = min(self._width, SLOTS_PER_EPOCH)
        while True:
            start = epoch * SLOTS_PER_EPOCH + self._rng.randrange(SLOTS_PER_EPOCH - width + 1)
            found = await self._pending(start, start + width, 4 * target)
            if found:
                self._learn(width, len(found), target)
                return found
            if width >= SLOTS_PER_EPOCH:
                return []
            width = min(4 * width, SLOTS_PER_EPOCH)

    def _learn(self, width: int, num_found: int, target: int) -> None:
        """Move the width towards the one that would have found `target`; slowly, as many claimers adapt at once."""
        ideal = max(1, width * target // num_found)
        self._width = min(SLOTS_PER_EPOCH, max(1, int(0.7 * self._width + 0.3 * min(ideal, 4 * width))))

    async def _pending(self, low: int, high: int, limit: int) -> list[Document]:
        slots = {"$gte": low, "$lt": high}
        query = {"split": self._split, "status": TaskStatus.PENDING.value, "slot": slots}
        return await self._tasks.find(query, {"_id": 1, "epoch": 1, "slot": 1}).limit(limit).to_list()

    def _shuffled(self, documents: Sequence[Document]) -> list[str]:
        ids = [document["_id"] for document in documents]
        self._rng.shuffle(ids)
        return ids


def random_slot(epoch: int, rng: random.Random) -> int:
    """A slot for a new Task of this epoch."""
    return epoch * SLOTS_PER_EPOCH + rng.randrange(SLOTS_PER_EPOCH)


def at_epoch(task: Task, epoch: int) -> Task:
    """The same item at another epoch."""
    return replace(task, id=f"{task.split}:{epoch}:{task.item_id}", epoch=epoch)


def pending_document(task: Task, *, rng: random.Random) -> Document:
    """The document of a new Task."""
    return task_to_document(task, slot=random_slot(task.epoch, rng))


def pending_again(*, rng: random.Random) -> dict[str, Any]:
    """The update that gives a running Task back."""
    return {
        "$set": {
            "status": TaskStatus.PENDING.value,
            "slot": -1 - rng.randrange(SLOTS_PER_EPOCH),
            "owner": None,
            "lease_until": None,
        }
    }


async def announce_epochs(database: Database, tasks: Sequence[Task]) -> None:
    """Let claimers know which epochs exist. Called before the Tasks are inserted, so that none is overlooked."""
    epochs: dict[str, set[int]] = {}
    for task in tasks:
        epochs.setdefault(task.split, set()).add(task.epoch)
    for split, values in epochs.items():
        update = {
            "$addToSet": {"epochs": {"$each": sorted(values)}},
            "$setOnInsert": {"schema_version": SCHEMA_VERSION},
        }
        await database.durable(SPLIT).update_one({"_id": split}, update, upsert=True)
