"""What `agentrl db stats` adds up."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import bson

from agentrl.store.dispatch_documents import SHARE_PROMPTS_ABOVE
from agentrl.store.indexes import DISPATCH, RECORD, TOKEN_PART
from agentrl.store.mongo import MongoStore
from agentrl.store.sizes import measure
from factories import make_task, make_turn

NUM_GENERATIONS = 8
BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "store_bytes.py"


async def one_group(store: MongoStore, *, prompt_tokens: int) -> None:
    await store.insert_tasks([make_task(num_generations=NUM_GENERATIONS)])
    (claim,) = await store.claim_tasks(split="train", owner="w", lease_s=60, limit=1)
    for opened in await store.open_records(claim):
        record = await store.commit_turn(opened, make_turn(opened, prompt_ids=range(prompt_tokens)))
        await store.commit_turn(record, make_turn(record, prompt_ids=range(2 * prompt_tokens)))


async def test_a_group_stores_its_prompt_once_and_the_saving_is_told(mongo_store: MongoStore) -> None:
    await one_group(mongo_store, prompt_tokens=1000)
    database = mongo_store._database
    (part,) = await database.durable(TOKEN_PART).find({}).to_list()
    assert part["bytes"] == bytes(b"".join(token.to_bytes(4, "little") for token in range(1000)))
    size = await measure(database)
    assert (size.prompt_bytes_named, size.prompt_bytes_stored) == (8 * 4000, len(bson.encode(part)))
    documents = [
        *await database.durable(RECORD).find({}).to_list(),
        *await database.durable(DISPATCH).find({}).to_list(),
    ]
    expected = sum(len(bson.encode(document)) for document in [*documents, part])
    assert size.trajectory_bytes == expected
    assert size.num_trajectories == NUM_GENERATIONS
    assert (size.collections[DISPATCH].num_documents, size.collections[DISPATCH].num_parts) == (16, 1)
    saved = 8 * 4000 - len(bson.encode(part))
    assert size.share_saved == saved / (expected + saved)


async def test_short_prompts_stay_with_their_turns(mongo_store: MongoStore) -> None:
    await one_group(mongo_store, prompt_tokens=SHARE_PROMPTS_ABOVE)
    size = await measure(mongo_store._database)
    assert size.collections[DISPATCH].num_parts == 0
    assert size.share_saved == 0.0


async def test_an_empty_run_has_no_size(mongo_store: MongoStore) -> None:
    size = await measure(mongo_store._database)
    assert (size.num_bytes, size.num_trajectories, size.trajectory_bytes, size.share_saved) == (0, 0, 0, 0.0)


async def test_a_trajectory_of_100_turns_takes_a_twentieth_of_full_messages_per_call(
    mongo_uri: str, database_name: str
) -> None:
    spec = importlib.util.spec_from_file_location("store_bytes", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    store_bytes = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = store_bytes  # its dataclass looks its own module up
    spec.loader.exec_module(store_bytes)
    found = await store_bytes.compare(mongo_uri, name=database_name, turns=100, generations=2)
    assert found.stored_bytes <= found.chat_bytes / 20
