"""A launched run that spends its budget, and goes on with a larger one: real processes from end to end."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from launched_run import DEADLINE_S, agentrl, output_of, write_run

pytestmark = pytest.mark.timeout(2 * DEADLINE_S)


def json_of(folder: Path, *arguments: str) -> Any:
    """What a command prints to stdout, below what it says on stderr."""
    return json.loads("{" + output_of(folder, *arguments).partition("{")[2])


def test_a_launch_ends_with_its_budget_trains_what_was_paid_for_and_goes_on_with_more(tmp_path: Path) -> None:
    (tmp_path / "prices.yml").write_text("model: {'*': {per_call: 0.01}}")
    folder = write_run(tmp_path, max_steps=3, price_file="prices.yml", num_samplers=2, max_staleness=0)
    with agentrl(folder, "launch", "tiny", "--config", "run.yaml", "--budget_usd", "0.1") as process:
        shown, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 4, shown
    ended = re.search(r"budget_usd = 0.1 is spent: run tiny ended after step (\d) of 3", " ".join(shown.split()))
    assert ended, shown
    num_steps = int(ended.group(1))
    assert 1 <= num_steps <= 2  # a step takes 4 to 8 completions: 1 or 2 for each of its 4 Records
    report = json_of(folder, "cost", "tiny", "--json")
    assert (report["spent_usd"], report["calls_usd"], report["budget_usd"]) == (0.1, 0.1, 0.1)
    assert len(report["steps"]) == num_steps
    assert json_of(folder, "audit", "tiny", "--json")["clean"]
    assert "0 tool calls in calls.jsonl" in output_of(folder, "journal", "tiny", "calls.jsonl")
    tool = json.loads((folder / "calls.jsonl").read_text().splitlines()[1])["tool"]
    assert (tool["name"], tool["server"]) == ("calculator", "calculator")

    with agentrl(folder, "launch", "tiny", "--config", "run.yaml", "--budget_usd", "10") as process:
        shown, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, shown
    report = json_of(folder, "cost", "tiny", "--json")
    assert report["spent_usd"] >= report["calls_usd"] > 0.1
    assert len(report["steps"]) == 3
