"""Scores beside a Record's own: which versions there are for it, and what its judges said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from agentrl.inspector.plain import plain
from agentrl.inspector.records import score_text
from agentrl.protocols import ScoreStore
from agentrl.types import DispatchedSamplingTask, Record, Score


async def with_scores(store: ScoreStore, records: Sequence[Record], *, version: str) -> list[Record]:
    """The Records with the scores of another version; those it has not scored have none."""
    scores = await store.find_scores(records, version=version)
    return [
        replace(
            record,
            score=scores[record.id].value if record.id in scores else None,
            scorer=version if record.id in scores else None,
        )
        for record in records
    ]


async def load_scores(store: ScoreStore, record: Record) -> list[Score]:
    """Every version's score of a Record's present attempt."""
    found = [await store.find_scores([record], version=version) for version in await store.count_scores()]
    return [scores[record.id] for scores in found if record.id in scores]


def _label(score: Score) -> str:
    values = ", ".join(f"{value:g}" for value in score.episode_values)
    return f"{score.version}, by episode {values}" if values else score.version


def render_scores(scores: Sequence[Score], calls: Sequence[DispatchedSamplingTask]) -> RenderableType:
    """The other versions' scores and the judge calls of a Record."""
    table = Table.grid(padding=(0, 2))
    for score in scores:
        table.add_row(Text("score", style="dim"), score_text(score.value), plain(_label(score)))
    for call in calls:
        said = call.error or str(call.response.get("text", ""))
        tokens = f"{call.response.get('prompt_tokens', 0)}+{call.response.get('completion_tokens', 0)} tokens"
        seconds = (call.finished_at - call.started_at).total_seconds()
        head = plain(f"{call.target} {call.status}, {tokens}, {seconds:.2f} s", style="dim")
        table.add_row(Text("judge", style="dim"), head, plain(" ".join(said.split())[:500]))
    return Group(table)
