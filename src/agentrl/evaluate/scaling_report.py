"""A measurement of test-time scaling as a file and as a picture, so that several can be compared."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from agentrl.errors import ConfigError
from agentrl.evaluate.scaling import SamplePoint, TurnPoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingReport:
    """What one policy version makes of more turns and of more samples on one set of tasks."""

    run_name: str
    policy_version: int
    temperature: float
    num_questions: int
    num_failed: int  # Records the system ended; they are in no mean
    splits: tuple[str, ...]  # where its Records are
    tasks: str = ""  # fingerprint of questions and answers; empty in reports of earlier versions
    turns: tuple[TurnPoint, ...] = ()
    samples: tuple[SamplePoint, ...] = ()

    def has_other_tasks(self, other: ScalingReport) -> bool:
        """Whether the two are known to be about different questions: their curves say nothing about each other."""
        are_known = bool(self.tasks and other.tasks)
        return self.num_questions != other.num_questions or (are_known and self.tasks != other.tasks)

    @property
    def label(self) -> str:
        """What the report is called beside others."""
        sampled = {0.0: " greedy", 1.0: ""}.get(self.temperature, f" t{self.temperature:g}")
        return f"{self.run_name} v{self.policy_version}{sampled}"


_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
_SHARES = {"accuracy", "accuracy_error", "em", "f1", "sub_em", "success", "pass_at", "pass_at_error"}
_FORMAT: TypeAdapter[ScalingReport] = TypeAdapter(ScalingReport)


def write_report(path: Path, report: ScalingReport) -> None:
    """The report as JSON, written beside and renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".partial")
    beside.write_bytes(_FORMAT.dump_json(report, indent=2) + b"\n")
    beside.replace(path)


def read_report(path: Path) -> ScalingReport:
    """A report that was written by `write_report`. Raises ConfigError."""
    try:
        report = _FORMAT.validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; give a file that agentrl eval wrote") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(f"{path} is no report of agentrl eval: {where}: {first['msg'].lower()}") from None
    if fault := _fault(report):
        raise ConfigError(f"{path} is no report of agentrl eval: {fault}")
    return report


def _fault(report: ScalingReport) -> str:
    """What no measurement can have given; empty: nothing."""
    if not _RUN_NAME.fullmatch(report.run_name):
        return f"run_name: {report.run_name[:80]!r} is no name of a run"
    points: list[TurnPoint | SamplePoint] = [*report.turns, *report.samples]
    for point in points:
        for name, value in asdict(point).items():
            if not math.isfinite(value) or (value < 0 and name != "score") or (value > 1 and name in _SHARES):
                return f"{name}: {value} cannot be"
    return ""


def draw_reports(path: Path, reports: Sequence[ScalingReport]) -> None:
    """A PNG of the curves of all reports: accuracy by turn, and against the tool calls it took. Renamed into place.

    A report that is there twice is drawn once; others with the same label are told apart by a number.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(11.0, 4.4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    by_turn, by_calls = figure.subplots(1, 2, sharey=True)
    different = list(dict.fromkeys(reports))
    labels = _distinct([report.label for report in different])
    for index, (report, label) in enumerate(zip(different, labels, strict=True)):
        _draw_report(by_turn, by_calls, report, label=label, color=f"C{index}")
    by_turn.set(xlabel="turn, or number of samples", ylabel="accuracy", ylim=(-0.02, 1.02))
    by_turn.xaxis.set_major_locator(MaxNLocator(integer=True))
    by_calls.set(xlabel="tool calls per question")
    for axes in (by_turn, by_calls):
        axes.grid(visible=True, alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*by_turn.get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".partial.png")
    figure.savefig(beside)
    beside.replace(path)


def _distinct(labels: Sequence[str]) -> list[str]:
    """The labels, with a number behind each that was there before."""
    before = [labels[:index].count(label) for index, label in enumerate(labels)]
    return [f"{label} ({count + 1})" if count else label for label, count in zip(labels, before, strict=True)]


def _draw_report(by_turn: Axes, by_calls: Axes, report: ScalingReport, *, label: str, color: str) -> None:
    turns, samples = report.turns, report.samples
    curves: list[tuple[str, str, Sequence[tuple[float, float, float, float]]]] = [
        ("turn by turn", "o-", [(p.turn, p.total_tool_calls, p.accuracy, p.accuracy_error) for p in turns]),
        ("majority vote", "s--", [(p.samples, p.total_tool_calls, p.accuracy, p.accuracy_error) for p in samples]),
        ("pass@k", "^:", [(p.samples, p.total_tool_calls, p.pass_at, p.pass_at_error) for p in samples]),
    ]
    for name, style, points in curves:
        if points:
            numbers, calls, heights, errors = zip(*points, strict=True)
            by_turn.errorbar(
                numbers, heights, errors, fmt=style, color=color, label=f"{label}: {name}", markersize=5, elinewidth=0.8
            )
            by_calls.errorbar(calls, heights, errors, fmt=style, color=color, markersize=5, elinewidth=0.8)
