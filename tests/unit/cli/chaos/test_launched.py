import json
from pathlib import Path

import pytest

from agentrl.cli.chaos.command import add_arguments
from agentrl.cli.chaos.launched import launch_environment, newest_step
from agentrl.cli.invocation import UsageParser, parse_invocation
from agentrl.cli.launch.processes import database, write_config
from agentrl.config import RunConfig
from agentrl.config.load import load_config
from agentrl.errors import ConfigError
from agentrl.store.embedded import embedded_uri


def load(tmp_path: Path, *flags: str, environ: dict[str, str] | None = None, file: Path | None = None) -> RunConfig:
    places = ["--run_name", "demo", "--output_dir", str(tmp_path / "o"), "--data_dir", str(tmp_path / "d")]
    return load_config(profile=None, config_file=file, environ=environ or {}, argv_flags=[*places, *flags])


def test_the_launch_sees_the_same_settings_as_chaos_and_the_proxy(tmp_path):
    config = load(tmp_path, "--max_steps", "7", "--mcp_auth_token", "s3cret")
    path = tmp_path / "chaos.json"
    write_config(config, path=path)
    environ = launch_environment(config, environ={"AGENTRL_MAX_STEPS": "99", "HOME": "/h"}, proxy_port=4711)
    seen = load(tmp_path, environ=environ, file=path)
    assert seen.train == config.train
    assert seen.tools.mcp_auth_token == "s3cret"
    assert seen.store.db_proxy_port == 4711
    assert environ["HOME"] == "/h"
    assert "s3cret" not in path.read_text()


def test_a_database_of_others_is_reached_directly(tmp_path):
    config = load(tmp_path, "--db_connection_string", "mongodb://u:p4ss@h/")
    environ = launch_environment(config, environ={}, proxy_port=None)
    assert environ["AGENTRL_DB_CONNECTION_STRING"] == "mongodb://u:p4ss@h/"
    assert "AGENTRL_DB_PROXY_PORT" not in environ


def test_the_launcher_tells_all_processes_the_proxy_and_remembers_it_nowhere(tmp_path):
    config = load(tmp_path, "--db_proxy_port", "4711", "--db_port", "4710")
    spec, uri = database(config, port=4710, environ={"PATH": "/bin"})
    assert uri == embedded_uri(4711)
    assert "4710" in spec.argv
    write_config(config)
    assert "db_proxy_port" not in json.loads((config.run.run_dir / "config.json").read_text())["store"]


def test_the_newest_step_is_that_of_the_last_whole_line(tmp_path):
    config = load(tmp_path)
    assert newest_step(config) == 0
    config.run.run_dir.mkdir(parents=True)
    metrics = config.run.run_dir / "metrics.jsonl"
    metrics.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert newest_step(config) == 2


def parse(*argv: str):
    parser = UsageParser(prog="agentrl chaos")
    parser.add_argument("--config", type=Path)
    add_arguments(parser)
    return parse_invocation(parser, argv, environ={}, uses_stored_config=True, default_profile="laptop")


def test_a_new_run_that_names_no_model_is_a_laptop_run(tmp_path):
    assert parse("demo", "--output_dir", str(tmp_path)).config.run.profile == "laptop"
    given = parse("demo", "--output_dir", str(tmp_path), "--model_name_or_path", "m")
    assert given.config.run.profile is None


def test_minutes_are_a_positive_number():
    assert parse("demo", "--minutes", "0.5", "--model_name_or_path", "m").arguments.minutes == 0.5
    for text in ("0", "-1", "inf", "nan", "soon"):
        with pytest.raises(ConfigError, match="--minutes"):
            parse("demo", "--minutes", text)
