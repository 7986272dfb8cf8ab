import json
import os
import sys
from pathlib import Path

from agentrl.cli.launch.processes import Processes, database, write_config
from agentrl.config import RunConfig
from agentrl.config.load import load_config


def make_config(tmp_path: Path, *flags: str) -> RunConfig:
    places = ["--run_name", "demo", "--output_dir", str(tmp_path / "o"), "--log_dir", str(tmp_path / "l")]
    return load_config(
        profile=None, config_file=None, environ={}, argv_flags=[*places, "--data_dir", str(tmp_path / "d"), *flags]
    )


def make_processes(config: RunConfig, environ: dict[str, str] | None = None) -> Processes:
    return Processes(config=config, uri="mongodb://db/", environ=environ or {"PATH": "/bin"})


def test_children_get_the_resolved_configuration_and_nothing_of_the_users_environment(tmp_path):
    config = make_config(tmp_path, "--max_steps", "7", "--mcp_auth_token", "s3cret")
    write_config(config)
    environ = {"PATH": "/bin", "AGENTRL_MAX_STEPS": "99", "TRAIN_FILE": "other", "RANK": "3", "HOME": "/h"}
    spec = make_processes(config, environ).sampler(1)
    stored = Path(spec.argv[spec.argv.index("--config") + 1])
    seen = load_config(profile=None, config_file=stored, environ=spec.environ, argv_flags=["--run_name", "demo"])
    assert seen.train.max_steps == 7
    assert seen.run.train_file is None
    assert seen.store.db_connection_string == "mongodb://db/"
    assert seen.tools.mcp_auth_token == "s3cret"
    assert spec.environ["RANK"] == "1"
    assert spec.environ["HOME"] == "/h"
    assert spec.environ["PATH"] == f"{Path(sys.executable).parent}{os.pathsep}/bin"
    assert "s3cret" not in " ".join(spec.argv) + stored.read_text()


def test_addresses_with_secrets_reach_the_children_and_no_file(tmp_path):
    addresses = {"inference_url": "http://u:s3cret@h:1", "mcp_manager_url": "http://h/mcp?token=s3cret"}
    config = make_config(tmp_path, *(token for name, url in addresses.items() for token in (f"--{name}", url)))
    write_config(config)
    spec = make_processes(config).sampler(0)
    stored = Path(spec.argv[spec.argv.index("--config") + 1])
    seen = load_config(profile=None, config_file=stored, environ=spec.environ, argv_flags=["--run_name", "demo"])
    assert seen.inference.inference_url == addresses["inference_url"]
    assert seen.tools.mcp_manager_url == addresses["mcp_manager_url"]
    assert "s3cret" not in " ".join(spec.argv) + stored.read_text()


def test_the_stored_configuration_keeps_no_address_of_an_embedded_database_and_no_password(tmp_path):
    config = make_config(tmp_path)
    write_config(config)
    stored = json.loads((tmp_path / "o" / "demo" / "config.json").read_text())
    assert "db_port" not in stored["store"]
    assert "db_connection_string" not in stored["store"]
    write_config(make_config(tmp_path, "--db_connection_string", "mongodb://u:p4ss@h/"))
    assert "p4ss" not in (tmp_path / "o" / "demo" / "config.json").read_text()
    write_config(make_config(tmp_path, "--db_connection_string", "mongodb://h/"))
    stored = json.loads((tmp_path / "o" / "demo" / "config.json").read_text())
    assert stored["store"]["db_connection_string"] == "mongodb://h/"


def test_each_process_has_its_log_file_and_samplers_stop_before_engines_before_the_database(tmp_path):
    config = make_config(tmp_path)
    processes = make_processes(config)
    specs = [processes.sampler(0), processes.sampler(1), processes.trainer(), processes.engine()]
    names = [spec.log_path.name for spec in specs]
    assert names == ["demo_sampler_0.log", "demo_sampler_1.log", "demo_train_0.log", "demo_engine_0.log"]
    server, uri = database(config, port=27117, environ={"PATH": "/bin"})
    assert [spec.stop_stage for spec in [*specs, server]] == [0, 0, 0, 1, 2]
    assert uri.startswith("mongodb://127.0.0.1:")
    assert [spec.name for spec in specs if spec.ends_run] == ["trainer"]


def test_one_trainer_process_needs_no_launcher_and_several_get_one(tmp_path):
    alone = make_processes(make_config(tmp_path)).trainer()
    assert alone.argv[:4] == (sys.executable, "-m", "agentrl.cli.main", "train")
    assert alone.environ["OMP_NUM_THREADS"] == "1"
    flags = ("--num_processes", "2", "--train_threads", "3", "--accelerate_config", "a.yml")
    several = make_processes(make_config(tmp_path, *flags)).trainer()
    text = " ".join(several.argv)
    assert "agentrl.train.launcher --config_file a.yml --num_processes 2" in text
    assert "--cpu " not in text, "it would start one process, whatever the file says"
    assert text.endswith(f"-m agentrl.cli.main train demo --config {tmp_path / 'o' / 'demo' / 'config.json'}")
    assert several.environ["OMP_NUM_THREADS"] == "3"
