import json
import sys
from pathlib import Path

import pytest

from agentrl.cli.launch.inputs import check_inputs
from agentrl.cli.main import main
from agentrl.config import RunConfig
from agentrl.config.load import ASSETS_DIR, load_config
from agentrl.errors import UserError
from agentrl.scoring import MCPScorerFactory
from tiny_chat import write_tiny_chat


@pytest.fixture(autouse=True)
def own_scorers(monkeypatch):
    """Scorers registered by a test end with it."""
    monkeypatch.setattr(MCPScorerFactory, "_scorers", dict(MCPScorerFactory._scorers))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = write_tiny_chat(tmp_path / "model")
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "tasks.jsonl").write_text('{"id": "a", "question": "1+1?", "answer": 2}\n')
    return tmp_path


def make_config(folder: Path, *flags: str) -> RunConfig:
    given = ["--model_name_or_path", str(folder / "model"), "--train_file", str(folder / "tasks.jsonl")]
    return load_config(profile=None, config_file=None, environ={}, argv_flags=[*given, *flags])


def test_complete_inputs_are_accepted(folder):
    check_inputs(make_config(folder, "--eval_file", str(folder / "tasks.jsonl")))


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("tasks.jsonl", r"tasks.jsonl cannot be read: No such file"),
        ("model/tokenizer.json", r"tokenizer.json does not exist"),
        ("model/model.safetensors", r"it has no weights"),
        ("model/config.json", r"it has no config.json"),
    ],
)
def test_what_is_missing_is_named_before_anything_is_started(folder, lost, message):
    (folder / lost).unlink()
    with pytest.raises(UserError, match=message):
        check_inputs(make_config(folder))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model_name_or_path", "none"], "model_name_or_path is not set"),
        (["--model_name_or_path", "nowhere"], "there is no such folder"),
        (["--train_file", "none"], "train_file is not set"),
        (["--eval_file", "nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["--mcp_config", "nowhere.json"], "nowhere.json"),
        (["--price_file", "nowhere.yml"], "price_file = nowhere.yml: No such file"),
        (["--tool_journal", "cache", "--tool_journal_file", "nowhere.jsonl"], "tool_journal_file = nowhere.jsonl"),
        (["--accelerate_config", "nowhere.yml"], "accelerate_config = nowhere.yml: there is no such file"),
        (["--loss_module", "nowhere.py"], "loss_module = 'nowhere.py' cannot be imported: ImportError: no such file"),
        (
            ["--tp_size", "2", "--num_processes", "3"],
            "num_processes = 3: needs a multiple of tp_size x cp_size = 2 x 1",
        ),
        (["--scorer_module", "nowhere.py"], "scorer_module = 'nowhere.py' cannot be imported"),
        (["--sampler_module", "nowhere.py"], "sampler_module = 'nowhere.py' cannot be imported"),
    ],
)
def test_a_setting_that_leads_nowhere_is_refused(folder, flags, message):
    with pytest.raises(UserError, match=message):
        check_inputs(make_config(folder, *flags))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("distributed_type: MULTI_CPU", r"with distributed_type = MULTI_CPU not num_processes = 2 but one is started"),
        ("a list", r"with distributed_type = None not"),
        ("a: b: c", r"accelerate.yml: no YAML \(mapping values are not allowed"),
    ],
)
def test_an_accelerate_config_that_would_start_something_else_is_refused(folder, content, message):
    path = folder / "accelerate.yml"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        check_inputs(make_config(folder, "--accelerate_config", str(path), "--num_processes", "2"))


def test_deepspeed_that_is_not_installed_is_refused_before_anything_is_started(folder, monkeypatch):
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not (Path(entry) / "deepspeed").is_dir()])
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    flags = ("--accelerate_config", str(ASSETS_DIR / "deepspeed_zero3.yml"), "--num_processes", "2")
    with pytest.raises(UserError, match=r"deepspeed_zero3.yml: deepspeed is not installed; run pip install"):
        check_inputs(make_config(folder, *flags))


def test_a_row_may_use_a_scorer_of_the_users_own_module(folder):
    module = folder / "my_scorers.py"
    module.write_text(
        "from agentrl.scoring import MCPScorerFactory\n"
        "async def always(answer, truth, config):\n    return 1.0\n"
        'MCPScorerFactory.register_scorer("always_one", always)\n'
    )
    row = {"id": "a", "question": "1+1?", "answer": 2, "scorer": "always_one"}
    (folder / "tasks.jsonl").write_text(json.dumps(row))
    with pytest.raises(UserError, match='scorer "always_one" is not registered'):
        check_inputs(make_config(folder))
    check_inputs(make_config(folder, "--scorer_module", str(module)))


def test_the_laptop_profile_makes_its_own_files_and_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    servers = {"mcpServers": {"calculator": {"command": "python", "args": ["-m", "agentrl.tools.servers.calculator"]}}}
    (tmp_path / "mcp.json").write_text(json.dumps(servers))
    laptop = load_config(
        profile="laptop", config_file=None, environ={}, argv_flags=["--mcp_config", str(tmp_path / "mcp.json")]
    )
    check_inputs(laptop)
    own = load_config(
        profile="laptop",
        config_file=None,
        environ={},
        argv_flags=["--mcp_config", str(tmp_path / "mcp.json"), "--train_file", "mine.jsonl"],
    )
    with pytest.raises(UserError, match=r"mine\.jsonl cannot be read"):
        check_inputs(own)


def test_a_scorer_module_that_fails_is_refused_in_one_line_also_where_the_profile_makes_the_tasks(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("from agentrl.scoring import MCPScorerFactory\n\nMCPScorerFactory.no_such()\n")
    (tmp_path / "mcp.json").write_text('{"mcpServers": {"calculator": {"command": "python"}}}')
    flags = ["--profile", "laptop", "--mcp_config", "mcp.json", "--scorer_module", "mine.py"]
    assert main(["launch", "demo", *flags]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert "AttributeError" in said
    assert "mine.py, line 3" in said
    assert not (tmp_path / "data").exists()
