"""Fixtures shared by all tests: one real database server per session, and a fresh database per test."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from agentrl.store import MemoryStore, MongoStore, open_store
from agentrl.store.embedded import start_embedded
from crashing_server import CrashingServer


@pytest.fixture(scope="session")
def free_port() -> int:
    """A port nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def mongo_uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URI of an embedded server that lives as long as the session."""
    directory = tmp_path_factory.mktemp("database")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = start_embedded(directory / "data", port=port, log_path=directory / "server.log")
    yield server.uri
    server.stop()


@pytest.fixture
def crashing(tmp_path: Path) -> Iterator[CrashingServer]:
    """A server of this test's own, to kill and start again."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    crashing = CrashingServer(directory=tmp_path, port=port)
    crashing.start()
    yield crashing
    crashing.server.stop()


@pytest.fixture
def database_name() -> str:
    """A name no other test uses."""
    return f"test_{uuid.uuid4().hex[:12]}"


@pytest.fixture
async def mongo_store(mongo_uri: str, database_name: str) -> AsyncIterator[MongoStore]:
    """A prepared MongoStore on its own empty database."""
    async for store in _opened(mongo_uri, database_name):
        yield store


@pytest.fixture
def memory_store() -> MemoryStore:
    """An empty MemoryStore."""
    return MemoryStore()


@pytest.fixture(params=["memory", "embedded", pytest.param("mongod", marks=pytest.mark.mongod)])
async def store(
    request: pytest.FixtureRequest, database_name: str, memory_store: MemoryStore
) -> AsyncIterator[MemoryStore | MongoStore]:
    """Every implementation of agentrl.protocols.Store in turn, prepared and empty."""
    if request.param == "memory":
        yield memory_store
        return
    if request.param == "mongod":
        uri = os.environ.get("MONGODB_URI")
        if uri is None:
            pytest.skip("MONGODB_URI is not set: no real MongoDB to test against")
    else:
        uri = request.getfixturevalue("mongo_uri")
    async for opened in _opened(uri, database_name):
        yield opened


async def _opened(uri: str, database_name: str) -> AsyncIterator[MongoStore]:
    opened = open_store(uri, database=database_name)
    await opened.prepare()
    try:
        yield opened
    finally:
        await opened.close()
