"""Reports of test-time scaling survive a file, and are drawn."""

import json
from dataclasses import replace

import pytest
from matplotlib.axes import Axes

from agentrl.errors import ConfigError
from agentrl.evaluate.scaling import Attempt, sample_points, turn_points
from agentrl.evaluate.scaling_report import ScalingReport, draw_reports, read_report, write_report

ROWS = [
    [Attempt(answer="Riga", num_tool_calls=1), Attempt(answer="Kaunas", score=1.0, em=1.0, num_tool_calls=2)],
    [Attempt(answer="Kaunas", score=1.0, em=1.0), Attempt(answer=None)],
]
REPORT = ScalingReport(
    run_name="demo", policy_version=40, temperature=0.0, num_questions=2, num_failed=1, splits=("eval-v40-turns2-abc",),
    turns=tuple(turn_points([[row] for row in ROWS], num_turns=2)), samples=tuple(sample_points(ROWS, num_samples=2)),
)  # fmt: skip


def test_a_report_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "eval" / "report.json"
    write_report(path, REPORT)
    assert read_report(path) == REPORT
    assert json.loads(path.read_text())["turns"][1]["wrong_to_right"] == 0.5
    assert [found.name for found in path.parent.iterdir()] == ["report.json"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        ("{}", "is no report of agentrl eval: run_name: field required"),
        ("[", "is no report of agentrl eval: the file: invalid json"),
    ],
)
def test_what_is_no_report_is_refused_in_one_line(tmp_path, content, message):
    path = tmp_path / "other.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message) as refusal:
        read_report(path)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("turns", 0, "accuracy_error"), -1, "accuracy_error: -1.0 cannot be"),
        (("turns", 0, "total_tool_calls"), float("inf"), "total_tool_calls: inf cannot be"),
        (("samples", 1, "pass_at"), float("nan"), "pass_at: nan cannot be"),
        (("samples", 1, "accuracy"), 7, "accuracy: 7.0 cannot be"),
        (("turns", 1, "turn"), -3, "turn: -3 cannot be"),
        (("run_name",), "$\\frac{$", "is no name of a run"),
    ],
)
def test_numbers_that_no_measurement_gives_are_refused_before_anything_is_drawn(tmp_path, place, value, message):
    path = tmp_path / "report.json"
    write_report(path, REPORT)
    content = json.loads(path.read_text())
    *outer, name = place
    inner = content
    for key in outer:
        inner = inner[key]
    inner[name] = value
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        read_report(path)


def test_a_report_is_drawn_once_and_others_of_the_same_name_are_told_apart(tmp_path, monkeypatch):
    drawn = []
    draw = Axes.errorbar

    def errorbar(self, *arguments, label=None, **settings):
        drawn.append(label)
        return draw(self, *arguments, label=label, **settings)

    monkeypatch.setattr(Axes, "errorbar", errorbar)
    other = replace(REPORT, samples=(), temperature=0.5)
    draw_reports(
        tmp_path / "scaling.png",
        [replace(REPORT, samples=()), replace(REPORT, samples=()), other, replace(other, num_failed=9)],
    )
    assert [label for label in drawn if label] == [
        "demo v40 greedy: turn by turn", "demo v40 t0.5: turn by turn", "demo v40 t0.5 (2): turn by turn",
    ]  # fmt: skip


def test_reports_of_turns_of_samples_and_of_both_are_drawn_into_one_picture(tmp_path):
    path = tmp_path / "eval" / "scaling.png"
    draw_reports(path, [REPORT, replace(REPORT, run_name="other", samples=()), replace(REPORT, turns=())])
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [found.name for found in path.parent.iterdir()] == ["scaling.png"]
