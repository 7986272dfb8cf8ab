import socket

from agentrl.cli.doctor import Verdict, examine
from agentrl.cli.main import main
from agentrl.config import ModelConfig, RunConfig, RunSection, StoreConfig, ToolsConfig


def findings(config: RunConfig) -> dict[str, tuple[Verdict, str, str]]:
    return {finding.subject: (finding.verdict, finding.found, finding.advice) for finding in examine(config)}


def test_this_machine_can_run_agentrl(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for subject in ("python", "torch", "cores", "memory", "disk", "GPU", "database", "model"):
        assert subject in out


def test_a_model_folder_without_a_tokenizer_is_a_problem_that_names_the_file(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    config = RunConfig(model=ModelConfig(model_name_or_path=tmp_path))
    verdict, found, advice = findings(config)["model"]
    assert verdict is Verdict.PROBLEM
    assert found.endswith("lacks tokenizer.json")
    assert "with tokenizer" in advice


def test_files_that_are_not_there_are_problems(tmp_path):
    run, tools = RunSection(train_file=tmp_path / "t.jsonl"), ToolsConfig(mcp_config=tmp_path / "m.json")
    found = findings(RunConfig(run=run, tools=tools))
    assert found["train_file"][0] is Verdict.PROBLEM
    assert found["mcp_config"][2] == "correct --mcp_config"


def test_a_taken_database_port_is_mentioned():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert f"port {port} answers already" in findings(RunConfig(store=StoreConfig(db_port=port)))["database"][1]


def test_a_problem_is_exit_code_1(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--train_file", "nowhere.jsonl"]) == 1


def test_a_database_that_does_not_answer_is_a_problem_and_its_password_is_not_shown(free_port):
    store = StoreConfig(db_connection_string=f"mongodb://u:s3cret@127.0.0.1:{free_port}/", db_timeout_s=0.2)
    verdict, found, advice = findings(RunConfig(store=store))["database"]
    assert verdict is Verdict.PROBLEM
    assert found.startswith(f"no MongoDB answers at mongodb://u:***@127.0.0.1:{free_port}/")
    assert "--db_connection_string" in advice
