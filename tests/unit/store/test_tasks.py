"""Counting stays cheap: large counts are reused and corrected, small ones are exact."""

from __future__ import annotations

from agentrl.store.mongo import MongoStore
from agentrl.store.tasks import _Counter
from agentrl.types import TaskStatus
from factories import make_task


async def test_a_large_count_follows_the_changes_of_this_process(mongo_store: MongoStore) -> None:
    await mongo_store.insert_tasks([make_task(str(k)) for k in range(400)])
    assert (await mongo_store.count_tasks(split="train"))[TaskStatus.PENDING] == 400
    await mongo_store.claim_tasks(split="train", owner="w", lease_s=60, limit=10)
    assert await mongo_store.count_tasks(split="train") == {
        TaskStatus.PENDING: 390,
        TaskStatus.RUNNING: 10,
        TaskStatus.SETTLED: 0,
    }


async def test_a_small_count_sees_what_other_processes_did(mongo_store: MongoStore, mongo_uri: str) -> None:
    await mongo_store.insert_tasks([make_task(str(k)) for k in range(5)])
    assert (await mongo_store.count_tasks(split="train"))[TaskStatus.PENDING] == 5
    other = MongoStore(mongo_store._database, rng=mongo_store._tasks._rng)
    await other.claim_tasks(split="train", owner="w", lease_s=60, limit=2)
    assert (await mongo_store.count_tasks(split="train"))[TaskStatus.PENDING] == 3


def test_a_large_count_is_taken_again_once_it_is_old_compared_to_its_cost() -> None:
    counter = _Counter(value=10_000, counted_at=float("-inf"), cost_s=0.1)
    assert counter.is_due
    counter.counted_at = float("inf")
    assert not counter.is_due
    counter.value = 3
    assert counter.is_due


async def test_a_look_finds_expired_claims_among_many_tasks_and_counts_what_is_rare_exactly(mongo_store):
    await mongo_store.insert_tasks([make_task(f"q{number}") for number in range(900)])
    running = await mongo_store.claim_tasks(split="train", owner="w", lease_s=60, limit=4)
    (expired,) = await mongo_store.claim_tasks(split="train", owner="dead", lease_s=0.0, limit=1)
    for _ in range(2):  # the second look knows that many are pending
        look = await mongo_store.look_over_tasks(split="train")
        assert look.counts[TaskStatus.RUNNING] == len(running)
        assert look.counts[TaskStatus.PENDING] == 896
    assert look.reaped == ()
    assert await mongo_store.claim_tasks(split="train", owner="w", lease_s=60, limit=896)
    assert expired.fence == 1
