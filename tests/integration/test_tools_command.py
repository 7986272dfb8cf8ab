"""`agentrl tools list|call|doctor` as commands, over real servers."""

import json
import re
import sys

import pytest

from agentrl.cli.main import main
from gateway_process import TEST_SERVER, tools_server, write_servers

CALCULATOR = {"command": "python", "args": ["-m", "agentrl.tools.servers.calculator"]}


def run(capsys, *arguments):
    code = main(["tools", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def config(tmp_path):
    return write_servers(tmp_path, {"math": CALCULATOR, "test": tools_server()})


def test_tools_are_listed_with_their_arguments(capsys, config):
    code, out, _ = run(capsys, "list", config)
    assert code == 0
    assert "calculator  (server math, stateless)\n    Compute one" in out
    assert "\n    a: integer\n" in out
    code, out, _ = run(capsys, "list", config, "--json")
    assert json.loads(out)[0]["function"]["parameters"]["required"] == ["expression"]


def test_a_call_shows_how_it_went_and_its_result(capsys, config):
    code, out, _ = run(capsys, "call", config, "calculator", '{"expression": "6*7"}')
    assert code == 0
    assert "calculator: ok after " in out
    assert out.endswith("\n\n42\n")
    code, out, _ = run(capsys, "call", config, "fail", "--json")
    shown = json.loads(out)
    assert (code, shown["status"], shown["content"]) == (1, "tool_error", "no luck")


def test_a_trace_tells_every_message_and_when(capsys, tmp_path):
    bare = {"command": "python", "args": ["-S", str(TEST_SERVER.with_name("bad_tool_server.py")), "good"]}
    code, out, _ = run(capsys, "trace", write_servers(tmp_path, {"bare": bare}), "count")
    assert code == 0
    assert re.search(
        r'note: \+\d\.\d{3} s  bare -> {.*"method":"tools/call".*\n.*note: \+\d\.\d{3} s  bare <- {.*"text": "1"', out
    )
    assert out.endswith("\n\n1\n")


def test_a_call_whose_server_dies_tells_of_it(capsys, config, tmp_path):
    code, out, _ = run(capsys, "call", config, "crash", json.dumps({"log": str(tmp_path / "log")}))
    assert code == 1
    assert "note: " in out
    assert " during a call of crash" in out
    assert "crash: crashed after" in out
    assert (tmp_path / "log").read_text(encoding="utf-8") == "called\n"


def test_the_doctor_checks_every_server_also_after_one_that_fails(capsys, tmp_path):
    broken = {"command": sys.executable, "args": ["-c", "import sys; sys.exit('licence missing')"]}
    config = write_servers(tmp_path, {"broken": broken, "math": CALCULATOR})
    code, out, _ = run(capsys, "doctor", config, "--tool_connect_timeout_s", "20")
    assert code == 1
    assert out.startswith("problem  broken")
    assert "licence missing" in out
    assert "\nok       math" in out
    code, out, _ = run(capsys, "doctor", write_servers(tmp_path, {"math": CALCULATOR}), "--json")
    checked = json.loads(out)
    assert (code, checked[0]["tools"], checked[0]["problems"]) == (0, ["calculator"], [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["call", "CONFIG"], "needs the name of a tool"),
        (["list", "CONFIG", "calculator"], "takes nothing but CONFIG"),
        (["call", "CONFIG", "calculator", "{"], "ARGUMENTS: not JSON"),
        (["call", "CONFIG", "calculator", "[]"], "expected a JSON object"),
        (["list", "missing.json"], "cannot be read"),
    ],
)
def test_misuse_is_one_line_and_exit_code_two(capsys, config, arguments, message):
    code, out, err = run(capsys, *(config if part == "CONFIG" else part for part in arguments))
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
