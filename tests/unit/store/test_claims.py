"""The claim queries use their indexes, and the probe adapts to the density of the queue."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from agentrl.store.claims import SLOTS_PER_EPOCH, ClaimQueue, random_slot
from agentrl.store.connection import Database
from agentrl.store.indexes import RECORD, TASK
from agentrl.store.mongo import MongoStore
from factories import make_task


@pytest.fixture
async def database(mongo_store: MongoStore) -> Database:
    return mongo_store._database


async def plan_of(database: Database, name: str, query: dict[str, Any]) -> str:
    explained = await database.durable(name).find(query).explain()
    return str(explained["queryPlanner"]["winningPlan"])


@pytest.mark.parametrize(
    ("name", "query"),
    [
        (TASK, {"split": "train", "status": "pending", "slot": {"$gte": 0, "$lt": 5}}),
        (TASK, {"split": "train", "status": "running", "lease_until": {"$lt": 5}}),
        (TASK, {"split": "train", "status": "settled"}),
        (RECORD, {"split": "train", "started_at": {"$gte": 5}}),
        ("DispatchedSamplingTask", {"turn_id": {"$in": ["a", "b"]}}),
        ("DBRecordData", {"split": "train"}),
        ("TrainStep", {"task_ids": "t"}),
        ("PolicyVersion", {"version": {"$gte": 3}}),
    ],
)
async def test_every_query_form_is_served_by_an_index(database: Database, name: str, query: dict[str, Any]) -> None:
    plan = await plan_of(database, name, query)
    assert "IXSCAN" in plan
    assert "COLLSCAN" not in plan


def test_slots_order_epochs() -> None:
    rng = random.Random(0)
    assert max(random_slot(3, rng) for _ in range(100)) < min(random_slot(4, rng) for _ in range(100))
    assert all(3 * SLOTS_PER_EPOCH <= random_slot(3, rng) < 4 * SLOTS_PER_EPOCH for _ in range(100))


async def test_the_probe_width_settles_at_a_few_candidates_in_a_long_queue(
    mongo_store: MongoStore, database: Database
) -> None:
    await mongo_store.insert_tasks([make_task(str(k)) for k in range(2000)])
    queue = ClaimQueue(database, split="train", rng=random.Random(0))
    for _ in range(15):
        assert len(await queue.claim(owner="w", lease_s=60, limit=1)) == 1
    expected = queue._width / SLOTS_PER_EPOCH * 2000
    assert 2 < expected < 60


async def test_a_short_queue_behind_many_claimers_is_emptied_without_duplicates(
    mongo_store: MongoStore, database: Database
) -> None:
    await mongo_store.insert_tasks([make_task(str(k), epoch=k % 3) for k in range(60)])
    queues = [ClaimQueue(database, split="train", rng=random.Random(seed)) for seed in range(8)]

    async def drain(queue: ClaimQueue) -> list[str]:
        taken: list[str] = []
        while claims := await queue.claim(owner="w", lease_s=60, limit=3):
            taken += [claim.task.id for claim in claims]
        return taken

    taken = [task_id for ids in await asyncio.gather(*(drain(queue) for queue in queues)) for task_id in ids]
    assert len(taken) == len(set(taken)) == 60


async def test_a_claimer_notices_epochs_that_others_added(mongo_store: MongoStore, database: Database) -> None:
    queue = ClaimQueue(database, split="train", rng=random.Random(0))
    assert await queue.claim(owner="w", lease_s=60, limit=1) == []
    await mongo_store.insert_tasks([make_task("a", epoch=40)])
    (claim,) = await queue.claim(owner="w", lease_s=60, limit=5)
    assert claim.task.epoch == 40
