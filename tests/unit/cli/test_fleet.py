"""`agentrl fleet`: what it keeps, shows and refuses; and whose settings a sampler of the fleet uses."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentrl.cli.fleet_connect import member_config
from agentrl.cli.main import main
from agentrl.config.load import load_config
from agentrl.config.secrets import masked
from agentrl.errors import ConfigError
from agentrl.fleets import FleetRun
from agentrl.store import open_fleet_runs, open_store
from factories import make_task


class Fleet:
    """The command on a real database, in a folder of its own."""

    def __init__(self, uri: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.uri, self.name, self.run_name, self.capsys = uri, name, f"{name}_run", capsys

    def __call__(self, action: str, *arguments: str) -> tuple[int, str]:
        code = main(["fleet", action, self.name, *arguments, "--db_connection_string", self.uri])
        shown = self.capsys.readouterr()
        return code, shown.out + shown.err

    def entry(self) -> FleetRun:
        async def read() -> FleetRun:
            fleet = open_fleet_runs(self.uri, fleet_name=self.name)
            (run,) = await fleet.list_fleet_runs()
            await fleet.close()
            return run

        return asyncio.run(read())

    def make_run(self) -> None:
        async def make() -> None:
            store = open_store(self.uri, database=self.run_name)
            await store.prepare()
            await store.insert_tasks([make_task()])
            await store.close()

        asyncio.run(make())


@pytest.fixture
def fleet(
    mongo_uri: str,
    database_name: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Fleet:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return Fleet(mongo_uri, database_name, capsys)


def test_a_run_is_added_with_its_settings_changed_and_removed(fleet: Fleet) -> None:
    fleet.make_run()
    settings = ("--model_name_or_path", "m", "--max_turns", "3", "--mcp_auth_token", "hush")
    code, shown = fleet("add", fleet.run_name, *settings, "--share", "2", "--budget_tasks", "100")
    assert (code, "active" in shown) == (0, True)
    entry = fleet.entry()
    assert (entry.share, entry.budget_tasks, entry.config["rollout"]["max_turns"]) == (2.0, 100, 3)
    assert "hush" not in str(entry.config)
    assert fleet("set", fleet.run_name, "--priority", "-1", "--budget_tasks", "none", "--pause")[0] == 0
    entry = fleet.entry()
    assert (entry.share, entry.priority, entry.budget_tasks, entry.status.value) == (2.0, -1, None, "paused")
    assert fleet("set", fleet.run_name, "--resume")[0] == 0
    assert fleet.entry().status.value == "active"
    assert "left" in fleet("remove", fleet.run_name)[1]
    assert "removed by a user" in fleet("status")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("add",), "RUN_NAME is missing"),
        (("add", "no_such_run", "--model_name_or_path", "m"), "there is no run no_such_run"),
        (("add", "no_such_run"), "model_name_or_path is not set"),
        (("set", "no_such_run", "--share", "2"), "run no_such_run is not in fleet"),
        (("set", "no_such_run", "--share", "0"), "needs a number above 0"),
        (("set", "no_such_run", "--budget_tasks", "-3"), "needs a whole number from 1"),
        (("status",), "there is no fleet"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(fleet: Fleet, arguments: tuple[str, ...], message: str) -> None:
    code, shown = fleet(*arguments)
    assert (code, shown.count("\n")) == (2, 1)
    assert message in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "demo", "--fleet_name", "f"), "fleet_name is for sample and serve"),
        (("sample", "demo", "--fleet_name", "f"), "choose one"),
        (("sample",), "RUN_NAME is missing"),
    ],
)
def test_a_command_works_for_a_run_or_for_a_fleet(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(list(arguments)) == 2
    assert message in capsys.readouterr().err


def test_a_member_has_its_own_settings_and_the_processes_database_and_secrets() -> None:
    def load(*flags: str):  # type: ignore[no-untyped-def]
        return load_config(profile=None, config_file=None, environ={}, argv_flags=list(flags))

    of_run = load("--max_turns", "3", "--mcp_auth_token", "one", "--db_connection_string", "mongodb://old/")
    process = load("--fleet_name", "f", "--mcp_auth_token", "two", "--db_connection_string", "mongodb://new/")
    config = member_config(FleetRun(name="run_a", config=masked(of_run)), process=process)
    assert (config.run.run_name, config.rollout.max_turns) == ("run_a", 3)
    assert (config.tools.mcp_auth_token, config.store.db_connection_string) == ("two", "mongodb://new/")
    broken = FleetRun(name="run_a", config={"rollout": {"max_turns": "many"}})
    with pytest.raises(ConfigError, match="run run_a: its settings in the fleet cannot be used"):
        member_config(broken, process=process)
