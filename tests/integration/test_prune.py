"""`agentrl db prune` removes helper databases that are over, and nothing that is or may be a run."""

import io
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
from rich.console import Console

from agentrl.cli.invocation import Invocation
from agentrl.cli.main import main
from agentrl.cli.prune import prune
from agentrl.config.load import load_config
from agentrl.store import MongoStore, open_store
from agentrl.store.connection import Database
from agentrl.store.indexes import SERVICE
from agentrl.types import InferenceService, PolicyVersion, ServiceStatus
from factories import make_sequence, make_task

KEYS = ("laptop-0123456789ab", "laptop-ba9876543210")  # only the first is finished


@dataclass
class Arguments:
    yes: bool


@pytest.fixture
async def names(mongo_uri: str, database_name: str, tmp_path: Path) -> AsyncIterator[dict[str, str]]:
    """Databases by what they are."""
    found = {
        "over": f"{database_name}-eval-v3",
        "in use": f"{database_name}-eval-v4",
        "a run": f"{database_name}-eval-v5",
        "another": f"{database_name}-evaluation",
        "start": KEYS[0],
        "unfinished": KEYS[1],
    }
    (tmp_path / "models" / KEYS[0]).mkdir(parents=True)
    stores = {what: open_store(mongo_uri, database=name) for what, name in found.items()}
    for what, store in stores.items():
        await store.prepare()
        await fill(store, what)
    yield found
    for store in stores.values():
        await store._database.drop()
        await store.close()


async def fill(store: MongoStore, what: str) -> None:
    await store.publish_policy(PolicyVersion(version=3, path="/policy"))
    await store.put_service(InferenceService(id="e", base_url="http://e", status=ServiceStatus.UP, policy_version=3))
    if what != "in use":
        long_ago = await store.server_time() - timedelta(hours=1)
        await store._database.durable(SERVICE).update_one({"_id": "e"}, {"$set": {"heartbeat_at": long_ago}})
    if what == "a run":
        await store.insert_tasks([make_task()])
    if what in {"start", "unfinished"}:
        await store.insert_sequences([make_sequence()])


async def databases(mongo_uri: str) -> set[str]:
    server = Database(mongo_uri, name="any", timeout_s=20)
    try:
        return set(await server.list_databases())
    finally:
        await server.close()


async def test_pruning_lists_first_and_removes_only_what_is_over(
    mongo_uri: str, names: dict[str, str], tmp_path: Path
) -> None:
    flags = ["--db_connection_string", mongo_uri, "--data_dir", str(tmp_path)]
    config = load_config(profile=None, config_file=None, environ={}, argv_flags=flags)
    before = await databases(mongo_uri)
    out = io.StringIO()
    console = Console(file=out, width=200)
    await prune(Invocation(config=config, arguments=Arguments(yes=False)), console)  # type: ignore[arg-type]
    assert await databases(mongo_uri) == before
    assert "2 databases; nothing was removed, --yes removes them" in out.getvalue()
    assert all(names[what] in out.getvalue() for what in ("over", "start"))
    await prune(Invocation(config=config, arguments=Arguments(yes=True)), console)  # type: ignore[arg-type]
    assert before - await databases(mongo_uri) == {names["over"], names["start"]}


def test_pruning_where_there_is_no_database_says_so_and_makes_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["db", "prune"]) == 2
    assert "there is no database in data" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
