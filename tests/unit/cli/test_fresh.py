"""Starting a run over keeps what was there, whatever happens on the way."""

from __future__ import annotations

import argparse
import io
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rich.console import Console

from agentrl.cli.fresh import check_fresh_arguments, kept_name, start_over
from agentrl.config import RunConfig
from agentrl.config.load import load_config
from agentrl.errors import ConfigError, StoreError, UnavailableError
from agentrl.store.connection import Database
from agentrl.store.indexes import TASK
from agentrl.store.mongo import MongoStore, open_store
from agentrl.types import Worker
from factories import make_task


@pytest.fixture
async def config(mongo_uri: str, database_name: str, tmp_path: Path) -> AsyncIterator[RunConfig]:
    flags = ["--run_name", database_name, "--db_connection_string", mongo_uri]
    flags += ["--output_dir", str(tmp_path / "output"), "--data_dir", str(tmp_path / "data")]
    yield load_config(profile=None, config_file=None, environ={}, argv_flags=flags)
    database = Database(mongo_uri, name=database_name, timeout_s=20)
    for name in await database.list_databases():
        if name.startswith(database_name):
            left = Database(mongo_uri, name=name, timeout_s=20)
            await left.drop()
            await left.close()
    await database.close()


@pytest.fixture
async def used(config: RunConfig, mongo_store: MongoStore) -> RunConfig:
    """A run with a database and files."""
    await mongo_store.insert_tasks([make_task(str(k)) for k in range(5)])
    (config.run.run_dir / "checkpoint-1").mkdir(parents=True)
    (config.run.run_dir / "checkpoint-1" / "weights").write_text("w")
    (config.run.run_dir / "config.json").write_text("{}")
    return config


def silent() -> Console:
    return Console(file=io.StringIO())


async def names(config: RunConfig) -> list[str]:
    database = Database(str(config.store.db_connection_string), name=config.run.run_name, timeout_s=20)
    found = await database.list_databases()
    await database.close()
    return [name for name in found if name.startswith(config.run.run_name)]


async def tasks_in(config: RunConfig, name: str) -> int:
    store = open_store(str(config.store.db_connection_string), database=name)
    await store.prepare()
    count = await store._database.durable(TASK).count_documents({})
    await store.close()
    return count


def files(config: RunConfig) -> list[str]:
    root = config.run.output_dir
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


async def test_a_new_run_starts_without_further_ado(config: RunConfig, mongo_store: MongoStore) -> None:
    await start_over(config, force=False, console=silent())
    assert await names(config) == [config.run.run_name]


async def test_a_used_run_is_refused_and_left_as_it_is(used: RunConfig) -> None:
    name = used.run.run_name
    with pytest.raises(ConfigError, match=r"holds a database and 2 files and folders in .*--force"):
        await start_over(used, force=False, console=silent())
    assert await names(used) == [name]
    assert await tasks_in(used, name) == 5
    assert files(used) == [f"{name}/checkpoint-1/weights", f"{name}/config.json", f"{name}/launch.lock"]


async def test_force_keeps_database_and_files_under_one_new_name(used: RunConfig) -> None:
    name = used.run.run_name
    await start_over(used, force=True, console=silent())
    (kept,) = await names(used)
    assert re.fullmatch(rf"{name}-\d{{8}}T\d{{6}}Z", kept)
    assert await tasks_in(used, kept) == 5
    assert files(used) == sorted([f"{kept}/checkpoint-1/weights", f"{kept}/config.json", f"{name}/launch.lock"])
    await start_over(used, force=False, console=silent())


async def test_files_alone_are_kept_too(config: RunConfig, mongo_store: MongoStore) -> None:
    config.run.run_dir.mkdir(parents=True)
    (config.run.run_dir / "metrics.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match="holds 1 files"):
        await start_over(config, force=False, console=silent())
    await start_over(config, force=True, console=silent())
    assert sorted(Path(path).name for path in files(config)) == ["launch.lock", "metrics.jsonl"]


async def test_a_run_that_somebody_works_on_is_refused(used: RunConfig, mongo_store: MongoStore) -> None:
    await mongo_store.put_worker(Worker(id="w", kind="sampler", host="elsewhere", pid=1))
    with pytest.raises(UnavailableError, match="in use by sampler w"):
        await start_over(used, force=True, console=silent())
    assert await names(used) == [used.run.run_name]
    await mongo_store.put_worker(Worker(id="w", kind="sampler", host="elsewhere", pid=1, phase="stopped"))
    await start_over(used, force=True, console=silent())


async def test_a_copy_that_differs_moves_and_removes_nothing(used: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files(used)

    async def lose_a_write(self: Database, collection: object, documents: object) -> set[object]:
        return set()

    with monkeypatch.context() as patch:
        patch.setattr(Database, "insert_new", lose_a_write)
        with pytest.raises(StoreError, match="Nothing was removed"):
            await start_over(used, force=True, console=silent())
    assert await names(used) == [used.run.run_name]
    assert await tasks_in(used, used.run.run_name) == 5
    assert [path for path in files(used) if not path.endswith("launch.lock")] == before


def test_the_kept_name_is_a_run_name_however_long() -> None:
    now = datetime(2026, 11, 29, 22, 5, 7, tzinfo=UTC)
    assert kept_name("demo", now=now) == "demo-20261129T220507Z"
    assert len(kept_name("x" * 63, now=now)) == 63


def test_force_alone_and_fresh_on_one_of_many_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="give both"):
        check_fresh_arguments(argparse.Namespace(fresh=False, force=True))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="agentrl launch"):
        check_fresh_arguments(argparse.Namespace(fresh=True, force=False))
