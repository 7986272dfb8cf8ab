"""A database of another release: reading it is a clear error that names document, version and way out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from agentrl.errors import StoredFormatError, StoreError, UserError
from agentrl.store import MongoStore
from agentrl.types import (
    InferenceService,
    PolicyVersion,
    RecordStatus,
    ServiceStatus,
    StepStatus,
    StopReason,
    ToolCall,
    ToolResult,
    ToolStatus,
    TrainStep,
    Worker,
)
from factories import EPOCH_START, make_sequence, make_settlement, make_task, make_turn

CALL = ToolCall(record_id="r", turn=0, index=1, server="s", tool="t", arguments={})
Read = Callable[[MongoStore], Awaitable[object]]


@pytest.fixture
async def full_store(mongo_store: MongoStore) -> MongoStore:
    """One document of every kind."""
    store = mongo_store
    await store.insert_tasks([make_task(num_generations=1)])
    (claim,) = await store.claim_tasks(split="train", owner="w", lease_s=60, limit=1)
    (record,) = await store.open_records(claim)
    record = await store.commit_turn(record, make_turn(record, prompt_ids=range(200)))
    final = replace(record, status=RecordStatus.FINISHED, stop_reason=StopReason.ANSWER, score=1.0, scorer="em")
    await store.finish_record(final)
    await store.settle_task(claim, make_settlement(rewards=(1.0,)), [make_sequence(record)])
    await store.plan_step(TrainStep(step=1, status=StepStatus.PLANNED, policy_version=0, task_ids=(), sequence_ids=()))
    await store.publish_policy(PolicyVersion(version=0, path="p"))
    await store.put_service(InferenceService(id="i", base_url="http://i", status=ServiceStatus.UP, policy_version=0))
    await store.put_worker(Worker(id="w", kind="sampler", host="h", pid=1, started_at=EPOCH_START))
    await store.put_run({"name": "demo"})
    await store.put_result(CALL, ToolResult(status=ToolStatus.OK, content="x"))
    return store


async def read_turns(store: MongoStore) -> object:
    record = await store.get_record("train:0:q1/g0")
    assert record is not None
    return await store.load_turns(record)


READS: dict[str, Read] = {
    "Task": lambda store: store.get_task("train:0:q1"),
    "Record": lambda store: store.get_record("train:0:q1/g0"),
    "DispatchedSamplingTask": read_turns,
    "DBRecordData": lambda store: store.load_sequences(["train:0:q1/g0/s0"]),
    "TrainStep": lambda store: store.list_steps(),
    "PolicyVersion": lambda store: store.latest_policy(),
    "InferenceService": lambda store: store.list_services(),
    "Worker": lambda store: store.list_workers(),
    "Run": lambda store: store.get_run(),
    "ToolJournal": lambda store: store.find_result(CALL),
}
MORE_READS: dict[str, tuple[str, Read]] = {
    "settled groups": ("Task", lambda store: store.settled_groups(split="train", limit=1)),
    "a settlement": ("Task", lambda store: store.get_settlement("train:0:q1")),
    "records": ("Record", lambda store: store.list_records(task_id="train:0:q1")),
    "a step": ("TrainStep", lambda store: store.get_step(1)),
}


async def rewrite(store: MongoStore, collection: str, fields: dict[str, Any]) -> str:
    """Change every document of a collection as another release would have written it; the id of one."""
    documents = store._database.durable(collection)
    await documents.update_many({}, {"$set": fields})
    found = await documents.find_one({})
    assert found is not None
    return str(found["_id"])


@pytest.mark.parametrize("version", [3, None])
@pytest.mark.parametrize("collection", READS)
async def test_an_unknown_schema_version_is_refused_with_document_version_and_way_out(
    full_store: MongoStore, collection: str, version: int | None
) -> None:
    await READS[collection](full_store)
    document_id = await rewrite(full_store, collection, {"schema_version": version})
    with pytest.raises(StoredFormatError) as raised:
        await READS[collection](full_store)
    message = str(raised.value)
    assert message.startswith(
        f"{collection} {document_id} has schema_version {version}, and this release reads 1 and 2"
    )
    assert "agentrl db export" in message
    assert isinstance(raised.value, UserError)
    assert isinstance(raised.value, StoreError)


@pytest.mark.parametrize("what", MORE_READS)
async def test_every_way_to_read_a_document_checks_it(full_store: MongoStore, what: str) -> None:
    collection, read = MORE_READS[what]
    await read(full_store)
    await rewrite(full_store, collection, {"schema_version": 3})
    with pytest.raises(StoredFormatError, match=f"{collection} .* schema_version 3"):
        await read(full_store)


@pytest.mark.parametrize("collection", ["DispatchedSamplingTask", "DBRecordData"])
@pytest.mark.parametrize(
    "fields",
    [
        {"payload.layout": [["prompt_ids", "int32", 3]], "payload.encoding": "raw"},  # before layouts were text
        {"payload.encoding": "brotli"},
    ],
    ids=["layout", "encoding"],
)
async def test_an_unknown_payload_is_refused_with_the_document_it_belongs_to(
    full_store: MongoStore, collection: str, fields: dict[str, Any]
) -> None:
    document_id = await rewrite(full_store, collection, fields)
    with pytest.raises(StoredFormatError, match="packs its arrays in a way") as raised:
        await READS[collection](full_store)
    assert f"{collection} {document_id}" in str(raised.value)


async def test_an_unknown_shared_prompt_is_refused_too(full_store: MongoStore) -> None:
    await rewrite(full_store, "DispatchedSamplingTask", {"tokens.prompt.layout": [["prompt_ids", "int32", 200]]})
    with pytest.raises(StoredFormatError, match="packs its arrays in a way"):
        await read_turns(full_store)
