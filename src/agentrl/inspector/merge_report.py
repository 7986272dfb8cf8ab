"""What each layout of the training rows costs in tokens, from the rows that a run stored. Pure; numpy, no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from agentrl.algo.trie import build_trie, input_tokens, model_calls
from agentrl.types import DBRecordData


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutTokens:
    """Tokens that a trainer feeds through the model for the same rows, padding aside."""

    num_groups: int = 0
    num_rows: int = 0
    trained: int = 0  # sampled tokens, the same in every layout
    per_call: int = 0
    linear: int = 0
    tree: int = 0
    num_missing: int = 0  # rows that the ledger names and the store does not have

    def __add__(self, other: LayoutTokens) -> LayoutTokens:
        """Both together."""
        return LayoutTokens(
            num_groups=self.num_groups + other.num_groups,
            num_rows=self.num_rows + other.num_rows,
            trained=self.trained + other.trained,
            per_call=self.per_call + other.per_call,
            linear=self.linear + other.linear,
            tree=self.tree + other.tree,
            num_missing=self.num_missing + other.num_missing,
        )

    def as_json(self) -> dict[str, int]:
        """For other programs."""
        return {
            "num_groups": self.num_groups,
            "num_rows": self.num_rows,
            "trained": self.trained,
            "per_call": self.per_call,
            "linear": self.linear,
            "tree": self.tree,
            "num_missing": self.num_missing,
        }


def group_layout_tokens(rows: Sequence[DBRecordData]) -> LayoutTokens:
    """Tokens of one group under every layout."""
    inputs = [input_tokens(row) for row in rows]
    return LayoutTokens(
        num_groups=1,
        num_rows=len(rows),
        trained=sum(int(row.loss_mask.sum()) for row in rows),
        per_call=sum(end - 1 for row in rows for _, end in model_calls(row)),
        linear=sum(row.size for row in inputs),
        tree=build_trie(inputs).num_tokens,
    )


def step_layout_tokens(rows: Iterable[DBRecordData], *, num_missing: int = 0) -> LayoutTokens:
    """Tokens of a step: its groups are those of the rows' Tasks."""
    groups: dict[str, list[DBRecordData]] = {}
    for row in rows:
        groups.setdefault(row.task_id, []).append(row)
    return sum((group_layout_tokens(group) for group in groups.values()), LayoutTokens(num_missing=num_missing))


def render_merge_report(steps: Mapping[int, LayoutTokens]) -> RenderableType:
    """One line per step and one for all."""
    table = Table(title="tokens through the model, by layout")
    for name in ("step", "groups", "rows", "trained", "per call", "linear", "tree", "linear / tree", "per call / tree"):
        table.add_column(name, justify="right")
    for step, tokens in sorted(steps.items()):
        table.add_row(str(step), *_cells(tokens))
    total = sum(steps.values(), LayoutTokens())
    table.add_section()
    table.add_row("all", *_cells(total), style="bold")
    saved = 1 - total.tree / max(total.linear, 1)
    lines = [Text(f"A token tree per group feeds {saved:.1%} fewer tokens than one row per branch.")]
    if total.num_missing:
        lines.append(Text(f"{total.num_missing:,} rows are not in the store and not counted.", style="yellow"))
    return Group(table, *lines)


def _cells(tokens: LayoutTokens) -> list[str]:
    counts = (tokens.num_groups, tokens.num_rows, tokens.trained, tokens.per_call, tokens.linear, tokens.tree)
    ratios = (tokens.linear / max(tokens.tree, 1), tokens.per_call / max(tokens.tree, 1))
    return [*(f"{count:,}" for count in counts), *(f"{ratio:.2f}x" for ratio in ratios)]
