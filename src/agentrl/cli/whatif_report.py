"""The comparison of losses on one step as a person reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    letters = [chr(ord("A") + index) for index in range(len(comparison.replays))]
    names = [plain(f"{letter}  {found.name}") for letter, found in zip(letters, comparison.replays, strict=True)]
    parts: list[RenderableType] = [
        Text(f"step {step}: {num_rows} rows, weights: {weights}", style="bold"),
        Text(),
        *names,
        Text(),
        _numbers(comparison, letters=letters),
    ]
    if recorded:
        logged = ", ".join(f"{name} {value:.5g}" for name, value in recorded.items())
        parts.append(Text(f"the run itself logged {logged}", style="dim"))
    parts += [
        Text(),
        Text("cosine between gradients", style="dim"),
        _cosines(comparison, letters=letters),
        Text(),
        _legend(),
    ]
    return Group(*parts)


def _numbers(comparison: Comparison, *, letters: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column()
    for column in ("value", "grad norm", "clipped", "muted", "ESS", "ratio", "max", "approx KL", "entropy"):
        table.add_column(column, justify="right", no_wrap=True)
    for letter, found in zip(letters, comparison.replays, strict=True):
        table.add_row(
            letter,
            f"{found.loss:+.5f}",
            f"{found.grad_norm:.4g}",
            *(f"{getattr(found, name):.1%}" for name in _SHARES),
            f"{found.ratio_mean:.3f}",
            f"{found.ratio_max:.3f}",
            f"{found.approx_kl:.1e}",
            f"{found.entropy:.3f}",
        )
    return table


def _cosines(comparison: Comparison, *, letters: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("", *letters):
        table.add_column(heading, justify="right", no_wrap=True)
    for letter, row in zip(letters, comparison.cosines, strict=True):
        table.add_row(letter, *(f"{value:+.3f}" for value in row))
    return table


def _legend() -> Text:
    return Text(
        "clipped: share of token weight beyond the clip range. muted: tokens with an advantage that get no gradient.\n"
        "ESS: effective sample size of the tokens' gradient factors, as a share; 100% when all weigh the same.",
        style="dim",
    )
