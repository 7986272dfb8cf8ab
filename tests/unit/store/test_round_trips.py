"""How often a committed turn goes to the server: the hot path, counted by the driver's own monitoring."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from pymongo import monitoring

from agentrl.store.mongo import MongoStore, open_store
from agentrl.types import Record
from command_counter import CommandCounter
from factories import make_task, make_turn


@pytest.fixture
def commands(database_name: str) -> CommandCounter:
    """Listens to clients that are created from now on."""
    counter = CommandCounter(database_name)
    monitoring.register(counter)
    return counter


@pytest.fixture
async def counted_store(commands: CommandCounter, mongo_uri: str, database_name: str) -> AsyncIterator[MongoStore]:
    store = open_store(mongo_uri, database=database_name)
    await store.prepare()
    yield store
    await store.close()


async def opened(store: MongoStore, *, num_generations: int) -> list[Record]:
    await store.insert_tasks([make_task(num_generations=num_generations)])
    (claim,) = await store.claim_tasks(split="train", owner="w", lease_s=600, limit=1)
    return await store.open_records(claim)


async def test_a_lone_rollout_goes_to_the_server_twice_per_turn(
    counted_store: MongoStore, commands: CommandCounter
) -> None:
    (record,) = await opened(counted_store, num_generations=1)
    record = await counted_store.commit_turn(record, make_turn(record, prompt_ids=range(300)))
    commands.reset()
    for _ in range(10):
        record = await counted_store.commit_turn(record, make_turn(record, tool_results=("3", "4")))
    assert commands.names == ["insert", "update"] * 10


async def test_rollouts_that_commit_together_share_their_round_trips(
    counted_store: MongoStore, commands: CommandCounter
) -> None:
    records = await opened(counted_store, num_generations=32)
    num_turns = 5

    async def roll_out(record: Record) -> None:
        for _ in range(num_turns):
            record = await counted_store.commit_turn(record, make_turn(record, tool_results=("3",)))

    commands.reset()
    await asyncio.gather(*map(roll_out, records))
    assert len(commands.names) <= 3 * len(records) * num_turns
    assert len(commands.names) <= len(records) * num_turns / 4, "32 commits at a time share what one would need"


async def test_the_first_turns_of_a_group_write_their_common_prompt_in_one_message(
    counted_store: MongoStore, commands: CommandCounter
) -> None:
    records = await opened(counted_store, num_generations=16)
    commands.reset()
    turns = [make_turn(record, prompt_ids=range(1000)) for record in records]
    await asyncio.gather(*map(counted_store.commit_turn, records, turns))
    assert len(commands.names) <= 3 * len(records)
    assert len(commands.names) <= 16, "two batches of at most seven messages"
