"""Trajectories of any length, and prompts that a group shares, read back as they were sampled."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from agentrl.errors import StoreError
from agentrl.store.indexes import TOKEN_PART
from agentrl.store.mongo import MongoStore
from agentrl.types import Record, Turn
from factories import make_task, make_turn


async def opened(store: MongoStore, *, num_generations: int, item_id: str = "q1") -> list[Record]:
    await store.insert_tasks([make_task(item_id, num_generations=num_generations)])
    (claim,) = await store.claim_tasks(split="train", owner="w", lease_s=600, limit=1)
    return await store.open_records(claim)


async def test_a_trajectory_of_three_million_tokens_reads_back_equal(mongo_store: MongoStore) -> None:
    noise = np.random.default_rng(0)
    (record,) = await opened(mongo_store, num_generations=1)
    turns: list[Turn] = []
    for num_tokens in (1_500_000, 500_000, 500_000, 500_000):
        prompt = noise.integers(0, 2**31 - 1, num_tokens).tolist()
        logprobs = noise.standard_normal(1000).astype(np.float32).tolist()
        turns.append(make_turn(record, prompt_ids=prompt, completion_ids=range(1000), logprobs=logprobs))
        record = await mongo_store.commit_turn(record, turns[-1])
    assert record.num_prompt_tokens == 3_000_000
    assert await mongo_store.load_turns(record) == turns
    largest = [len(part["bytes"]) async for part in mongo_store._database.durable(TOKEN_PART).find({}, batch_size=1)]
    assert max(largest) <= 4 * 1024 * 1024


async def test_a_group_with_one_long_prompt_stores_it_once_whoever_writes_first(mongo_store: MongoStore) -> None:
    prompt = tuple(np.random.default_rng(0).integers(0, 2**31 - 1, 1_200_000).tolist())
    records = await opened(mongo_store, num_generations=3)
    turns = [make_turn(record, prompt_ids=prompt, completion_ids=(record.generation,)) for record in records]
    first = await mongo_store.commit_turn(records[0], turns[0])
    rest = await asyncio.gather(*(mongo_store.commit_turn(r, t) for r, t in zip(records[1:], turns[1:], strict=True)))
    parts = await mongo_store._database.durable(TOKEN_PART).find({}, {"_id": 1}).to_list()
    assert len(parts) == 2
    for record, turn in zip((first, *rest), turns, strict=True):
        assert await mongo_store.load_turns(record) == [turn]


async def test_other_prompts_of_the_same_group_are_stored_beside(mongo_store: MongoStore) -> None:
    first, second = await opened(mongo_store, num_generations=2)
    one, other = make_turn(first, prompt_ids=range(300)), make_turn(second, prompt_ids=range(1, 301))
    first, second = await mongo_store.commit_turn(first, one), await mongo_store.commit_turn(second, other)
    branch = make_turn(first, prompt_ids=range(300), parent_turn=-1)
    first = await mongo_store.commit_turn(first, branch)
    assert await mongo_store.load_turns(first) == [one, branch]
    assert await mongo_store.load_turns(second) == [other]
    assert len(await mongo_store._database.durable(TOKEN_PART).find({}).to_list()) == 2


async def test_a_prompt_that_is_gone_or_damaged_is_an_error(mongo_store: MongoStore) -> None:
    (record,) = await opened(mongo_store, num_generations=1)
    record = await mongo_store.commit_turn(record, make_turn(record, prompt_ids=range(300)))
    parts = mongo_store._database.durable(TOKEN_PART)
    await parts.update_one({}, {"$set": {"bytes": b"wrong"}})
    with pytest.raises(StoreError, match="checksum"):
        await mongo_store.load_turns(record)
    await parts.delete_many({})
    with pytest.raises(StoreError, match="checksum"):
        await mongo_store.load_turns(record)
