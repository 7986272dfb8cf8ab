"""The comparison of losses on one step as a person reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from agentrl.inspector.plain import plain

if TYPE_CHECKING:
    from agentrl.train.whatif import Comparison

_SHARES = ("clip_fraction", "muted_fraction", "effective_sample_fraction")


def render_comparison(
    comparison: Comparison, *, step: int, num_rows: int, weights: str, recorded: Mapping[str, float]
) -> RenderableType:
    """Numbers of every loss, then the cosines between their gradients. `recorded`: what the run itself logged."""
    numbers = Table(box=None, pad_edge=False, header_style="dim")
    numbers.add_column("loss", overflow="fold")
    columns = ("value", "grad norm", "clipped", "muted", "ESS", "ratio", "max ratio", "approx KL", "entropy")
    for column in columns:
        numbers.add_column(column, justify="right")
    for found in comparison.replays:
        numbers.add_row(
            plain(found.name),
            f"{found.loss:+.5f}",
            f"{found.grad_norm:.4g}",
            *(f"{getattr(found, name):.1%}" for name in _SHARES),
            f"{found.ratio_mean:.4f}",
            f"{found.ratio_max:.3f}",
            f"{found.approx_kl:.2e}",
            f"{found.entropy:.3f}",
        )
    parts: list[RenderableType] = [
        Text(f"step {step}: {num_rows} rows, weights: {weights}", style="bold"),
        Text(),
        numbers,
    ]
    if recorded:
        logged = ", ".join(f"{name} {value:.5g}" for name, value in recorded.items())
        parts.append(Text(f"the run itself logged {logged}", style="dim"))
    parts += [Text(), Text("cosine between gradients", style="dim"), _cosines(comparison), Text(), _legend()]
    return Group(*parts)


def _cosines(comparison: Comparison) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(overflow="fold")
    for found, row in zip(comparison.replays, comparison.cosines, strict=True):
        table.add_row(plain(found.name), *(f"{value:+.3f}" for value in row))
    return table


def _legend() -> Text:
    return Text(
        "clipped: share of token weight beyond the clip range. muted: tokens with an advantage that get no gradient.\n"
        "ESS: effective sample size of the tokens' gradient factors, as a share; 100% when all weigh the same.",
        style="dim",
    )
