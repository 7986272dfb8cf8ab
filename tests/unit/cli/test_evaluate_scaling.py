"""What `agentrl eval --reflection_turns --parallel` shows and writes."""

import argparse
import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from agentrl.cli.evaluate_scaling import add_scaling_arguments, count_range, scaling_request, show_reports
from agentrl.config import RunConfig
from agentrl.config.sections import RunSection
from agentrl.errors import ConfigError
from agentrl.evaluate.scaling import Attempt, sample_points, turn_points
from agentrl.evaluate.scaling_report import ScalingReport

ROWS = [
    [Attempt(answer="Riga", num_tool_calls=1), Attempt(answer="Kaunas", score=1.0, em=1.0, num_tool_calls=2)],
    [Attempt(answer="Kaunas", score=1.0, em=1.0), Attempt(answer=None)],
]
REPORT = ScalingReport(
    run_name="demo", policy_version=40, temperature=1.0, num_questions=2, num_failed=3, splits=("s",),
    turns=tuple(turn_points([[row] for row in ROWS], num_turns=2)), samples=tuple(sample_points(ROWS, num_samples=2)),
)  # fmt: skip


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--generations", type=int, default=1)
    add_scaling_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(("text", "expected"), [("6", range(1, 7)), ("1..6", range(1, 7)), ("3..6", range(3, 7))])
def test_a_number_is_the_range_from_1_to_it(text, expected):
    assert count_range(text) == expected


def test_a_report_of_some_turns_does_not_replace_that_of_all(tmp_path):
    config = RunConfig(run=RunSection(run_name="demo", output_dir=tmp_path))
    request = scaling_request(parsed("--reflection_turns", "2"))
    assert request is not None
    out = io.StringIO()
    console = Console(file=out, width=120)
    show_reports([REPORT, replace(REPORT, turns=REPORT.turns[1:])], request=request, config=config, console=console)
    folder = tmp_path / "demo" / "eval"
    assert sorted(path.name for path in folder.iterdir()) == [
        "scaling.png", "v40-turns2-samples2-t1.json", "v40-turns2to2-samples2-t1.json",
    ]  # fmt: skip
    shown = out.getvalue()
    assert "accuracy of the vote" in shown
    assert "3 Records failed and are in no mean" in shown
    report = str(folder / "v40-turns2-samples2-t1.json")
    other = scaling_request(parsed("--parallel", "2", "--compare", report))
    assert other is not None
    assert other.compared == (REPORT,)
    assert json.loads((folder / "v40-turns2-samples2-t1.json").read_text())["run_name"] == "demo"
    show_reports([replace(REPORT, tasks="1a")], request=other, config=config, console=console)
    assert "other tasks" not in out.getvalue(), "a report of an earlier version does not say"
    elsewhere = replace(other, compared=(replace(REPORT, tasks="2b"),))
    show_reports([replace(REPORT, tasks="1a")], request=elsewhere, config=config, console=console)
    assert "demo v40 of --compare was measured on other tasks" in out.getvalue()
    with pytest.raises(ConfigError, match="--compare needs --reflection_turns or --parallel"):
        scaling_request(parsed("--compare", report))
