"""The table of Records."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from agentrl.inspector.plain import plain
from agentrl.types import Record

ANSWER_WIDTH = 32


def render_records(records: Sequence[Record]) -> RenderableType:
    """One line per Record, in the order given; fits 80 columns."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("record", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    for column in ("score", "turns", "tools", "prompt", "sampled"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("answer", no_wrap=True, max_width=ANSWER_WIDTH)
    for record in records:
        table.add_row(
            plain(record.id),
            record.stop_reason.value if record.stop_reason else record.status.value,
            score_text(record.score),
            str(len(record.turn_ids)),
            str(record.num_tool_calls),
            str(record.num_prompt_tokens),
            str(record.num_completion_tokens),
            plain(record.answer or record.error or "", style="" if record.answer else "dim"),
        )
    return table


def score_text(score: float | None) -> Text:
    """A score, green when positive; a missing one is a dash, not a 0."""
    if score is None:
        return Text("-", style="dim")
    return Text(f"{score:.2f}", style="green" if score > 0 else "red")
