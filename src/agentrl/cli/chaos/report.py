"""What a chaos campaign shows at its end: every fault with its effect and recovery, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl.cli.chaos.campaign import Outcome, Suffered


def show_outcome(console: Console, *, outcome: Outcome) -> None:
    """Print the table of faults."""
    table = Table(box=None, header_style="dim", pad_edge=False)
    for heading in ("at", "step", "fault", "victim"):
        table.add_column(heading, no_wrap=True)
    table.add_column("effect", overflow="fold")
    for heading in ("back", "next step"):
        table.add_column(heading, justify="right")
    for suffered in outcome.suffered:
        table.add_row(*_cells(suffered), style="red" if suffered.effect.is_violation else None)
    console.print(table)


def show_verdict(console: Console, *, outcome: Outcome, problems: Sequence[str]) -> None:
    """Print one line for a run that came through, else every problem."""
    faults = f"{len(outcome.suffered)} faults in {outcome.seconds:.0f} s, {outcome.last_step} steps"
    if not problems:
        console.print(Text.assemble(("✓ ", "green"), f"{faults}: the run finished and its audit is clean"))
        return
    console.print(Text.assemble(("✗ ", "red"), f"{faults}: {len(problems)} problems"))
    for problem in problems:
        console.print(Text(f"  {problem}"), soft_wrap=True)


def _cells(suffered: Suffered) -> tuple[str, ...]:
    return (
        f"{suffered.at_s:.0f} s",
        str(suffered.step),
        suffered.fault.kind.name,
        suffered.effect.victim,
        suffered.effect.seen,
        _seconds(suffered.back_after_s),
        _seconds(suffered.step_after_s),
    )


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} s"
