"""`agentrl eval RUN --reflection_turns 1..6 --parallel 1..6`: what more turns and more samples of a policy buy.

OUTPUT_DIR/RUN_NAME/eval/v40-turns6-samples6-t1.json    one report per policy version
OUTPUT_DIR/RUN_NAME/eval/scaling.png                    the curves of all of them, and of --compare
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.evaluate.measure import ScalingPlan
from agentrl.evaluate.scaling import SamplePoint, TurnPoint
from agentrl.evaluate.scaling_report import ScalingReport, draw_reports, read_report, write_report
from agentrl.inspector.plain import plain

MAX_TURNS = 64
_RANGE = re.compile(r"([0-9]{1,4})(?:\.\.([0-9]{1,4}))?")


def add_scaling_arguments(parser: argparse.ArgumentParser) -> None:
    """What of test-time scaling to measure."""
    parser.add_argument(
        "--reflection_turns",
        type=count_range,
        metavar="K or A..K",
        help="attempts at each question, each after reflecting on those before; 1 is without reflection",
    )
    parser.add_argument(
        "--parallel",
        type=count_range,
        metavar="K or A..K",
        help="independent samples of each question, put together by a majority vote; also pass@k",
    )
    parser.add_argument(
        "--compare", default="", metavar="FILE,...", help="reports of other evaluations, drawn into the same picture"
    )


def count_range(text: str) -> range:
    """Argument type: `6` and `1..6` are 1 to 6, `3..6` leaves out 1 and 2."""
    match = _RANGE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: needs a number such as 6, or a range such as 1..6")
    last = int(match[2] or match[1])
    first = int(match[1]) if match[2] else 1
    if not 1 <= first <= MAX_TURNS or not 1 <= last <= MAX_TURNS:
        raise argparse.ArgumentTypeError(f"{text!r}: needs numbers from 1 to {MAX_TURNS}")
    if first > last:
        raise argparse.ArgumentTypeError(f"{text!r}: the range runs backwards; give {last}..{first}")
    return range(first, last + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRequest:
    """What the user asked for."""

    plan: ScalingPlan
    compared: tuple[ScalingReport, ...]


def scaling_request(arguments: argparse.Namespace) -> ScalingRequest | None:
    """What the arguments ask for; None: a plain evaluation. Raises ConfigError for reports that cannot be read."""
    compared = tuple(read_report(Path(name.strip())) for name in arguments.compare.split(",") if name.strip())
    if arguments.reflection_turns is None and arguments.parallel is None:
        if compared:
            raise ConfigError("--compare needs --reflection_turns or --parallel: a plain evaluation has no curves")
        return None
    plan = ScalingPlan(
        turns=arguments.reflection_turns, samples=arguments.parallel, num_generations=arguments.generations
    )
    return ScalingRequest(plan=plan, compared=compared)


def show_reports(
    reports: Sequence[ScalingReport], *, request: ScalingRequest, config: RunConfig, console: Console
) -> None:
    """Print the tables, write the reports and the picture, and say where they are."""
    folder = config.run.run_dir / "eval"
    for report in reports:
        if report.turns:
            console.print(_turn_table(report))
        if report.samples:
            console.print(_sample_table(report))
        if report.num_failed:
            console.print(f"{report.num_failed} Records failed and are in no mean", soft_wrap=True)
        path = folder / f"{_stem(report)}.json"
        write_report(path, report)
        console.print(f"report   {plain(str(path))}", soft_wrap=True)
    for other in request.compared:
        if any(report.has_other_tasks(other) for report in reports):
            note = f"{other.label} of --compare was measured on other tasks: its curves say nothing about these"
            console.print(plain(note), soft_wrap=True)
    picture = folder / "scaling.png"
    draw_reports(picture, [*reports, *request.compared])
    console.print(f"picture  {plain(str(picture))}", soft_wrap=True)


def _stem(report: ScalingReport) -> str:
    """A file name for the report: the same question again replaces it, another one does not."""
    turns = _span("turns", [point.turn for point in report.turns])
    samples = _span("samples", [point.samples for point in report.samples])
    return f"v{report.policy_version}{turns}{samples}-t{report.temperature:g}"


def _span(name: str, numbers: Sequence[int]) -> str:
    if not numbers:
        return ""
    return f"-{name}{numbers[-1]}" if numbers[0] == 1 else f"-{name}{numbers[0]}to{numbers[-1]}"


def _turn_table(report: ScalingReport) -> Table:
    points = report.turns
    table = _table(f"{report.label}: turn by turn", [f"turn {point.turn}" for point in points])
    rows = [
        ("accuracy", [_with_error(p.accuracy, p.accuracy_error) for p in points]),
        ("score", [f"{p.score:.3f}" for p in points]),
        *_rule_rows(points),
        ("success@turn", [f"{p.success:.3f}" for p in points]),
        ("wrong to right", [f"{p.wrong_to_right:.3f}" for p in points]),
        ("right to wrong", [f"{p.right_to_wrong:.3f}" for p in points]),
        ("repeated answers", [f"{p.repeated_answers:.3f}" for p in points]),
        ("without answer", [f"{p.unanswered:.3f}" for p in points]),
        ("no room for the turn", [f"{p.lost:.3f}" for p in points]),
        ("invalid actions", [f"{p.invalid_actions:.3f}" for p in points]),
        ("tool calls", [f"{p.tool_calls:.2f}" for p in points]),
        ("tool calls so far", [f"{p.total_tool_calls:.2f}" for p in points]),
    ]
    return _filled(table, rows)


def _sample_table(report: ScalingReport) -> Table:
    points = report.samples
    table = _table(f"{report.label}: parallel samples", [f"{point.samples}" for point in points])
    rows = [
        ("accuracy of the vote", [_with_error(p.accuracy, p.accuracy_error) for p in points]),
        ("score", [f"{p.score:.3f}" for p in points]),
        *_rule_rows(points),
        ("pass@k", [_with_error(p.pass_at, p.pass_at_error) for p in points]),
        ("tool calls", [f"{p.total_tool_calls:.2f}" for p in points]),
    ]
    return _filled(table, rows)


def _rule_rows(points: Sequence[TurnPoint] | Sequence[SamplePoint]) -> list[tuple[str, list[str]]]:
    return [
        ("em", [f"{point.em:.3f}" for point in points]),
        ("f1", [f"{point.f1:.3f}" for point in points]),
        ("sub-em", [f"{point.sub_em:.3f}" for point in points]),
    ]


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title=plain(title), title_justify="left")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _filled(table: Table, rows: Sequence[tuple[str, list[str]]]) -> Table:
    for index, (label, values) in enumerate(rows):
        table.add_row(label, *values, style="bold" if index == 0 else "")
    return table


def _with_error(value: float, error: float) -> str:
    return f"{value:.3f} ± {error:.3f}"
