"""How a launch begins, with real processes: a tool server that hangs, and a run that starts over."""

import json
import sys
import time
from pathlib import Path

import pytest

from launched_run import DEADLINE_S, agentrl, launch, output_of, wait_until_nothing_is_left, write_run

pytestmark = pytest.mark.timeout(400)

CONNECT_S = 4.0
HANGS = "import sys, time\nfor line in sys.stdin: time.sleep(3600)"


def test_a_tool_server_that_never_initialises_ends_the_launch_with_one_line_within_the_connection_deadline(tmp_path):
    folder = write_run(tmp_path, tool_connect_timeout_s=CONNECT_S)
    server = {"command": sys.executable, "args": ["-c", HANGS]}
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": {"hung": server}}))
    began = time.monotonic()
    with launch(folder) as run:
        shown, _ = run.communicate(timeout=DEADLINE_S)
        took_s = time.monotonic() - began
        assert run.returncode == 2, shown
    said = [line for line in shown.splitlines() if line.startswith("agentrl: ")]
    assert len(said) == 1, shown
    assert shown.splitlines()[-1] == said[0]
    assert said[0].startswith("agentrl: sampler 0: tool server 'hung'")
    assert "no answer within the connect timeout" in said[0]
    assert "Traceback" not in shown
    assert CONNECT_S < took_s < DEADLINE_S
    wait_until_nothing_is_left(folder)


def test_a_run_starts_over_only_by_force_and_keeps_what_was_there(tmp_path: Path):
    folder = write_run(tmp_path, max_steps=2)
    command = ("launch", "tiny", "--config", "run.yaml")
    assert "step 2/2" in output_of(folder, *command)
    with agentrl(folder, *command, "--fresh") as refused:
        shown, _ = refused.communicate(timeout=DEADLINE_S)
        assert refused.returncode == 2
    assert "run tiny holds a database and" in shown
    assert "add --force" in shown
    shown = output_of(folder, *command, "--fresh", "--force")
    assert "kept the earlier run as tiny-" in shown
    assert all(f"step {step}/2" in shown for step in (1, 2))
    (kept,) = (folder / "output").glob("tiny-*")
    for run_dir in (kept, folder / "output" / "tiny"):
        steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        assert steps == [1, 2]
        assert (run_dir / "final" / "config.json").is_file()
    for name in (kept.name, "tiny"):
        assert "step 2/2" in output_of(folder, "status", name, "--once")
    wait_until_nothing_is_left(folder)
