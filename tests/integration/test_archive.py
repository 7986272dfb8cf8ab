"""A run becomes one file and comes back bit for bit; nothing but a whole, unaltered file is ever imported."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import bson
import numpy as np
import pytest
from bson.binary import Binary
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.errors import ArchiveError, UnavailableError
from agentrl.store.archive import check_file, export_run, import_run
from agentrl.store.connection import Database
from agentrl.store.indexes import IMPORT, TASK
from agentrl.store.mongo import MongoStore, open_store
from agentrl.store.scan import Fingerprint, Writer, collection_names, copy_database, is_empty, read_all
from agentrl.types import RecordStatus, StopReason, ToolCall, ToolResult, ToolStatus
from factories import make_sequence, make_settlement, make_task, make_turn

ODD_NAN = struct.unpack("<d", bytes.fromhex("010000000000f8ff"))[0]


@pytest.fixture
async def target(mongo_uri: str, database_name: str) -> AsyncIterator[Database]:
    """Another, empty database on the same server."""
    database = Database(mongo_uri, name=f"{database_name}_copy", timeout_s=60)
    yield database
    await database.drop()
    await database.close()


async def fill(store: MongoStore, *, prompt_tokens: int = 300, num_tasks: int = 2) -> None:
    """Settled groups of two Records with two turns each, and one Task in every other state."""
    noise = np.random.default_rng(0)
    for number in range(num_tasks):
        task = make_task(f"q.{number}$", answer="4")
        await store.insert_tasks([task])
        (claim,) = await store.claim_tasks(split="train", owner="w", lease_s=60, limit=1)
        rows = []
        prompt = noise.integers(0, 2**31 - 1, prompt_tokens).tolist()
        for opened in await store.open_records(claim):
            first = make_turn(opened, prompt_ids=prompt, tool_results=("3", "\ud800"))
            record = await store.commit_turn(opened, first)
            record = await store.commit_turn(record, make_turn(record, text="a\x00b"))
            final = replace(record, status=RecordStatus.FINISHED, stop_reason=StopReason.ANSWER, score=1.0, answer="4")
            await store.finish_record(final)
            rows.append(make_sequence(final, prompt_ids=prompt))
        await store.settle_task(claim, make_settlement(task), rows)
    await store.insert_tasks([make_task("pending", epoch=3)])
    await store.put_run({"config": {"a.b": 2**70, "$x": [None]}})
    call = ToolCall(record_id="r", turn=0, index=1, server="s", tool="t", arguments={"to": "\ud800"})
    answer = random.Random(0).randbytes(4 * prompt_tokens).hex()
    await store.put_result(call, ToolResult(status=ToolStatus.OK, content=answer))


def listed(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


async def fingerprints(database: Database) -> dict[str, Fingerprint]:
    prints = {}
    for name in await collection_names(database):
        prints[name] = Fingerprint()
        async for document in read_all(database, name):
            prints[name].add(document.raw)
    return {name: each for name, each in prints.items() if each.num_documents}


@pytest.mark.parametrize("prompt_tokens", [300, 2_500_000], ids=["small", "with parts beyond the document limit"])
async def test_a_run_comes_back_bit_for_bit(
    mongo_store: MongoStore, target: Database, tmp_path: Path, prompt_tokens: int
) -> None:
    await fill(mongo_store, prompt_tokens=prompt_tokens, num_tasks=1 if prompt_tokens > 10**6 else 2)
    source = mongo_store._database
    exported = await export_run(source, tmp_path / "run.jsonl")
    assert listed(tmp_path) == ["run.jsonl"]
    contents = check_file(tmp_path / "run.jsonl")
    assert (contents.run, contents.counts) == (source.name, {k: n for k, n in exported.counts.items() if n})
    await import_run(target, tmp_path / "run.jsonl", contents)
    assert await fingerprints(target) == await fingerprints(source)


async def test_an_imported_run_goes_on(
    mongo_store: MongoStore, mongo_uri: str, target: Database, tmp_path: Path
) -> None:
    await fill(mongo_store)
    await export_run(mongo_store._database, tmp_path / "run.jsonl")
    await import_run(target, tmp_path / "run.jsonl", check_file(tmp_path / "run.jsonl"))
    restored = open_store(mongo_uri, database=target.name)
    try:
        await restored.prepare()
        for record in await mongo_store.list_records():
            assert await restored.load_turns(record) == await mongo_store.load_turns(record)
        (claim,) = await restored.claim_tasks(split="train", owner="w", lease_s=60, limit=5)
        assert claim.task.item_id == "pending"
    finally:
        await restored.close()


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.integers(-(2**31), 2**31 - 1).map(Int64)
    | st.floats()
    | st.just(ODD_NAN)
    | st.text()
    | st.binary(max_size=20).map(lambda data: Binary(data, 128))
    | st.datetimes().map(lambda moment: moment.replace(microsecond=moment.microsecond // 1000 * 1000)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab.$é", min_size=1), inner, max_size=3),
    max_leaves=8,
)


@given(fields=st.dictionaries(st.text("xyz", min_size=1), values, max_size=4))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_any_document_survives(mongo_uri: str, tmp_path: Path, fields: dict[str, object]) -> None:
    raw = RawBSONDocument(bson.encode({"_id": "d", **fields}))
    for name in ("source", "target"):
        database = Database(mongo_uri, name=f"archive_{name}", timeout_s=60)
        await database.drop()
        if name == "source":
            writer = Writer(database, TASK)
            await writer.add(raw)
            await writer.flush()
            await export_run(database, tmp_path / "run.jsonl")
            stored = [bytes(document.raw) async for document in read_all(database, TASK)]
        else:
            await import_run(database, tmp_path / "run.jsonl", check_file(tmp_path / "run.jsonl"))
            assert [bytes(document.raw) async for document in read_all(database, TASK)] == stored
        await database.close()


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def without_last_line(data: bytes) -> bytes:
    return b"".join(data.splitlines(keepends=True)[:-1])


def without_a_document(data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    return b"".join([*lines[:3], *lines[4:]])


def with_another_answer(data: bytes) -> bytes:
    assert data.count(b'"answer":"4"') >= 1
    return data.replace(b'"answer":"4"', b'"answer":"5"', 1)


def of_the_future(data: bytes) -> bytes:
    return data.replace(b'"schema_version":2', b'"schema_version":9', 1)


def with_more_at_the_end(data: bytes) -> bytes:
    return data + data.splitlines(keepends=True)[1]


def something_else(data: bytes) -> bytes:
    return b'{"question": "?"}\n'


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (cut, "breaks off"),
        (without_last_line, "breaks off"),
        (without_a_document, "checksum"),
        (with_another_answer, "checksum"),
        (of_the_future, "schema_version 9"),
        (with_more_at_the_end, "last line"),
        (something_else, "not made by"),
    ],
)
async def test_an_altered_or_unknown_file_is_refused(mongo_store: MongoStore, tmp_path: Path, alter, message) -> None:
    await fill(mongo_store, num_tasks=1)
    path = tmp_path / "run.jsonl"
    await export_run(mongo_store._database, path)
    path.write_bytes(alter(path.read_bytes()))
    with pytest.raises(ArchiveError, match=message):
        check_file(path)


async def test_a_database_with_documents_is_left_alone(mongo_store: MongoStore, tmp_path: Path) -> None:
    await fill(mongo_store, num_tasks=1)
    path = tmp_path / "run.jsonl"
    await export_run(mongo_store._database, path)
    before = await fingerprints(mongo_store._database)
    with pytest.raises(ArchiveError, match="--as"):
        await import_run(mongo_store._database, path, check_file(path))
    assert await fingerprints(mongo_store._database) == before


async def test_an_import_that_broke_off_blocks_the_run_until_it_is_repeated(
    mongo_store: MongoStore, mongo_uri: str, target: Database, tmp_path: Path
) -> None:
    await fill(mongo_store)
    path = tmp_path / "run.jsonl"
    await export_run(mongo_store._database, path)
    contents = check_file(path)

    def break_off(name: str, num_documents: int, num_bytes: int) -> None:
        if num_documents == contents.counts[TASK]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await import_run(target, path, contents, progress=break_off)
    half = open_store(mongo_uri, database=target.name)
    with pytest.raises(UnavailableError, match="import that broke off"):
        await half.prepare()
    await half.close()
    await import_run(target, path, contents)
    assert await fingerprints(target) == await fingerprints(mongo_store._database)
    assert IMPORT not in await collection_names(target)


async def test_an_export_that_cannot_be_written_leaves_nothing(mongo_store: MongoStore, tmp_path: Path) -> None:
    await fill(mongo_store, num_tasks=1)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ArchiveError, match="cannot be written"):
        await export_run(mongo_store._database, tmp_path / "file" / "run.jsonl")

    def break_off(name: str, num_documents: int, num_bytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await export_run(mongo_store._database, tmp_path / "run.jsonl", progress=break_off)
    assert listed(tmp_path) == ["file"]


async def test_a_file_is_json_lines_that_people_can_read(mongo_store: MongoStore, tmp_path: Path) -> None:
    await fill(mongo_store, num_tasks=1)
    await export_run(mongo_store._database, tmp_path / "run.jsonl")
    header, *documents, end = map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines())
    assert (header["agentrl_export"], header["run"]) == (1, mongo_store._database.name)
    assert sum(end["counts"].values()) == len(documents)
    tasks = [line["document"] for line in documents if line["collection"] == TASK]
    assert {task["query"] for task in tasks} == {"What is 1 + 1?"}


async def test_a_copy_of_a_database_holds_everything(mongo_store: MongoStore, target: Database) -> None:
    await fill(mongo_store)
    assert await is_empty(target)
    assert await copy_database(mongo_store._database, target) > 10
    assert await fingerprints(target) == await fingerprints(mongo_store._database)
