import json
import subprocess
import sys

import pytest

from agentrl.cli.main import COMMANDS, main
from agentrl.errors import StoreError


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("DB_CONNECTION_STRING", "MODEL_NAME_OR_PATH", "TRAIN_FILE", "INFERENCE_URL", "MCP_MANAGER_URL"):
        monkeypatch.delenv(name, raising=False)


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["train"], "RUN_NAME is missing; see agentrl train --help"),
        (["status", "demo", "--onec"], "--onec: no such setting; did you mean --once?"),
        (["train", "demo", "--learning_rat", "1"], "--learning_rat: no such setting; did you mean --learning_rate?"),
        (["train", "demo", "extra"], "'extra': one argument too many"),
        (["train", "de mo"], '--run_name = "de mo"'),
        (["train", "demo", "--num_generations", "1"], "num_generations = 1: a group baseline needs at least 2"),
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["inspect", "demo"], "there is no database in data: start a run with `agentrl launch RUN_NAME`"),
        (["tasks", "load", "demo"], "train_file is not set"),
        (["tasks", "load", "--train_file", "t"], "RUN_NAME is missing"),
        (["eval", "demo"], "eval_file is not set"),
        (["eval", "demo", "--generations", "0"], "argument --generations: '0': needs a whole number from 1"),
        (["eval", "demo", "--reflection_turns", "0"], "argument --reflection_turns: '0': needs numbers from 1 to 64"),
        (["eval", "demo", "--reflection_turns", "6..1"], "'6..1': the range runs backwards; give 1..6"),
        (["eval", "demo", "--parallel", "many"], "'many': needs a number such as 6, or a range such as 1..6"),
        (["eval", "demo", "--parallel", "20"], "20 samples per question: votes are averaged over all subsets"),
        (["eval", "demo", "--temperature", "-1"], "'-1': needs a number from 0 to 100; 0 is greedy"),
        (["eval", "demo", "--compare", "x.json"], "x.json cannot be read: No such file or directory"),
        (["db", "--db_connection_string", "mongodb://x"], "db_connection_string is set"),
        (["launch", "demo"], "model_name_or_path is not set"),
        (["launch", "demo", "--bf16", "maybe"], "'maybe': one argument too many, and no value of --bf16"),
        (["launch", "admin"], "run_name = admin: MongoDB keeps its own data under this name"),
        (["inspect", "demo", "--limit", "-3"], "argument --limit: '-3': needs a whole number from 1"),
        (["--dry_run", "launch", "demo"], "--dry_run: the command comes first, then its flags"),
        (["status", "demo", "--db_connection_string", "mongodb://u:s3/cret@h"], "mongodb://u:***@h: Port contains"),
    ],
)
def test_what_the_user_can_fix_is_one_line_and_exit_code_2(capsys, argv, message):
    code, out, err = run(capsys, *argv)
    assert code == 2
    assert out == ""
    assert err.startswith("agentrl: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_dry_run_prints_the_resolved_configuration_without_secrets(capsys, name):
    own = {"tasks": ["load", "demo"], "db": [], "fleet": ["add", "f", "demo"], "tools": ["list", "servers.json"]}
    own["journal"] = ["demo", "calls.jsonl"]
    positional = own.get(name, ["demo"])
    flags = ["--learning_rate", "1e-4", "--db_connection_string", "mongodb://u:s3cret@h/", "--dry_run"]
    code, out, _ = run(capsys, name, *positional, *flags)
    assert code == 0
    config = json.loads(out)
    assert config["train"]["learning_rate"] == 1e-4
    assert config["store"]["db_connection_string"] == "mongodb://u:***@h/"


def test_the_run_name_may_be_given_as_a_flag_and_the_positional_wins(capsys):
    assert json.loads(run(capsys, "train", "--run_name", "a", "--dry_run")[1])["run"]["run_name"] == "a"
    assert json.loads(run(capsys, "train", "--run_name", "a", "b", "--dry_run")[1])["run"]["run_name"] == "b"


def test_a_launched_run_is_described_by_its_stored_configuration(capsys, tmp_path):
    stored = tmp_path / "output" / "demo" / "config.json"
    stored.parent.mkdir(parents=True)
    stored.write_text(json.dumps({"train": {"max_steps": 77}}))
    assert json.loads(run(capsys, "status", "demo", "--dry_run")[1])["train"]["max_steps"] == 77
    assert json.loads(run(capsys, "status", "other", "--dry_run")[1])["train"]["max_steps"] == 40
    code, out, _ = run(capsys, "status", "demo", "--max_steps", "5", "--dry_run")
    assert code == 0
    assert json.loads(out)["train"]["max_steps"] == 5


def test_a_file_where_a_folder_should_be_is_one_line_with_the_way_out(capsys, tmp_path):
    (tmp_path / "taken").write_text("a file")
    (tmp_path / "tasks.jsonl").write_text('{"q": "1+1?", "a": 2}')
    flags = ["--train_file", "tasks.jsonl", "--data_dir", "taken"]
    code, out, err = run(capsys, "tasks", "load", "demo", *flags)
    assert (code, out) == (2, "")
    assert err.startswith("agentrl: taken")
    assert "a file is where a folder should be" in err
    assert err.count("\n") == 1


def test_of_errors_at_the_same_time_the_first_of_ours_is_told_in_one_line(capsys, monkeypatch):
    def fail(tokens):
        ours = [StoreError("the database went away"), StoreError("and again")]
        raise ExceptionGroup("tasks", [OSError("a socket"), ExceptionGroup("more", ours)])

    monkeypatch.setattr("agentrl.cli.main._dispatch", fail)
    assert run(capsys, "rescore", "demo") == (1, "", "agentrl: the database went away\n")


def test_what_a_message_quotes_cannot_drive_the_terminal(capsys, tmp_path):
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"q": "1+1?", "a": 2, "scorer": "\x1b[2Jevil"}))
    code, _, err = run(capsys, "tasks", "load", "demo", "--train_file", "tasks.jsonl")
    assert code == 2
    assert r'scorer "\x1b[2Jevil" cannot be read' in err
    assert not (tmp_path / "data").exists()


def test_a_secret_that_was_not_stored_is_asked_for_where_it_is_used(capsys, tmp_path):
    stored = tmp_path / "output" / "demo" / "config.json"
    stored.parent.mkdir(parents=True)
    tools = {"mcp_manager_url": "http://h/mcp?token=***"}
    stored.write_text(json.dumps({"tools": tools, "store": {"db_connection_string": "mongodb://u:***@h/"}}))
    code, _, err = run(capsys, "status", "demo")
    assert code == 2
    assert "db_connection_string = mongodb://u:***@h/: its secret is not kept with the run" in err
    assert "AGENTRL_DB_CONNECTION_STRING" in err
    given = ["--db_connection_string", "mongodb://127.0.0.1:9/", "--db_timeout_s", "0.1"]
    code, _, shown = run(capsys, "status", "demo", *given)
    assert (code, "no MongoDB answers" in shown) == (1, True)  # not 2: it may be restarting
    assert "mcp_manager_url = http://h/mcp?token=***: its secret" in run(capsys, "sample", "demo", *given)[2]


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.startswith("agentrl 0.")


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert name in out
        assert command.summary in out


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in {"train", "serve"}])
def test_only_trainer_and_engine_load_torch(name):
    code = f"""
import sys
from agentrl.cli.main import COMMANDS, main
from agentrl.errors import StoreError
import importlib
importlib.import_module(COMMANDS[{name!r}].module)
heavy = [name for name in ("torch", "transformers", "accelerate", "matplotlib") if name in sys.modules]
sys.exit(", ".join(heavy) or 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_an_importable_trainer_and_engine_command_start_light_too():
    code = "import sys, agentrl.cli.train, agentrl.cli.serve; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_the_laptop_tasks_can_be_generated_and_are_the_same_every_time(capsys, tmp_path):
    def generate(name: str) -> str:
        files = ["--train_file", f"{name}/t.jsonl", "--eval_file", f"{name}/e.jsonl"]
        code, out, _ = run(capsys, "tasks", "generate", *files)
        assert code == 0
        assert "t.jsonl" in out
        return (tmp_path / name / "t.jsonl").read_text() + (tmp_path / name / "e.jsonl").read_text()

    assert generate("a") == generate("b")
    code, out, _ = run(capsys, "tasks", "generate", "--train_file", "a/t.jsonl", "--eval_file", "a/e.jsonl")
    assert (code, out) == (0, "wrote nothing: both files are there\n")
