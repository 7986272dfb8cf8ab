"""Options, messages and clocks of the connection."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta

import pytest
from pymongo.errors import AutoReconnect, OperationFailure

from agentrl.errors import ConfigError, StoreError, UnavailableError
from agentrl.store import open_store
from agentrl.store.connection import Database, ServerClock, embedded_uri, redact_uri


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("mongodb://user:secret@h1:1,h2:2/db?x=1", "mongodb://user:***@h1:1,h2:2/db?x=1"),
        ("mongodb+srv://user:s%40c@cluster.example", "mongodb+srv://user:***@cluster.example"),
        ("mongodb://user:sec/ret@h:1/db", "mongodb://user:***@h:1/db"),
        ("mongodb://h:1/?a=b%40c", "mongodb://h:1/?a=b%40c"),
    ],
)
def test_passwords_are_not_shown(uri: str, shown: str) -> None:
    assert redact_uri(uri) == shown


async def test_an_unreachable_database_is_named_without_its_password_and_with_the_way_out(free_port: int) -> None:
    store = open_store(f"mongodb://user:secret@127.0.0.1:{free_port}/", database="d", timeout_s=0.3)
    with pytest.raises(UnavailableError) as raised:
        await store.prepare()
    await store.close()
    assert f"127.0.0.1:{free_port}" in str(raised.value)
    assert "secret" not in str(raised.value)
    assert "agentrl db" in str(raised.value)


def test_a_uri_that_is_none_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="mongodb://"):
        open_store("http://localhost:27017", database="d")


async def test_every_operation_ends_within_its_time(free_port: int) -> None:
    store = open_store(embedded_uri(free_port), database="d", timeout_s=0.3)
    started = time.monotonic()
    with pytest.raises(StoreError, match="within"):
        await store.claim_tasks(split="train", owner="w", lease_s=1, limit=1)
    assert time.monotonic() - started < 5
    await store.close()


@pytest.mark.parametrize(
    ("uri", "retries", "concern"),
    [
        ("mongodb://h:1/", True, {"w": "majority", "j": True}),
        ("mongodb://h:1/?w=1&retryWrites=false", False, {"w": 1, "j": True}),
        (embedded_uri(1), False, {"j": True}),
    ],
)
async def test_write_options_are_safe_unless_the_uri_says_otherwise(
    uri: str, retries: bool, concern: dict[str, object]
) -> None:
    database = Database(uri, name="d", timeout_s=1)
    collection = database.durable("Task")
    assert collection.write_concern.document == concern
    assert database.relaxed("Task").write_concern.document == {"w": 1}
    assert collection.database.client.options.retry_writes is retries
    await database.close()


@pytest.fixture
def database() -> Database:
    return Database(embedded_uri(1), name="d", timeout_s=2)


async def test_lost_connections_are_retried_and_refusals_are_not(database: Database) -> None:
    failures: list[Exception] = [AutoReconnect("gone"), OperationFailure("stepping down", code=189)]

    async def flaky() -> str:
        if failures:
            raise failures.pop(0)
        return "done"

    async def refused() -> str:
        raise OperationFailure("not allowed", code=13)

    assert await database.run("try", flaky) == "done"
    with pytest.raises(StoreError, match="not allowed"):
        await database.run("try", refused)
    await database.close()


async def test_an_operation_that_hangs_is_cut_off(database: Database) -> None:
    database.timeout_s = 0.05
    with pytest.raises(StoreError, match="hang in d"):
        await database.run("hang", asyncio.Event().wait)
    await database.close()


async def test_the_clock_asks_the_server_once_and_again_after_a_reconnect() -> None:
    asked = 0
    server_time = datetime(2020, 1, 1, tzinfo=UTC)

    async def read() -> datetime:
        nonlocal asked
        asked += 1
        return server_time

    clock = ServerClock(read)
    first = await clock.now()
    second = await clock.now()
    assert asked == 1
    assert server_time <= first <= second < server_time + timedelta(minutes=1)
    clock.invalidate()
    await clock.now()
    assert asked == 2
