"""Reward curves: one line of text, a small text plot, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

LEVELS = "▁▂▃▄▅▆▇█"
SMOOTHING_STEPS = 5


def sparkline(values: Sequence[float], *, low: float, high: float) -> str:
    """One character per value; `low` and below is the lowest block, `high` and above the full one."""
    span = high - low
    if span <= 0:
        return LEVELS[0] * len(values)
    top = len(LEVELS) - 1
    return "".join(LEVELS[min(top, max(0, round((value - low) / span * top)))] for value in values)


def text_plot(values: Sequence[float], *, width: int, height: int, low: float, high: float) -> str:
    """A bar plot in characters, at most `width` columns (each the mean of its steps), with a labelled axis."""
    if not values:
        return "no steps yet"
    columns = _columns(values, width=width)
    span = max(high - low, 1e-9)
    eighths = [min(max((value - low) / span, 0.0), 1.0) * height * 8 for value in columns]
    rows = []
    for row in range(height - 1, -1, -1):
        label = low + span * (row + 1) / height
        rows.append(f"{label:6.2f} ┤" + "".join(_cell(level - row * 8) for level in eighths))
    rows.append(f"{low:6.2f} └" + "─" * len(columns))
    rows.append("  step  1" + (str(len(values)).rjust(len(columns) - 1) if len(values) > 1 else ""))
    return "\n".join(rows)


def moving_mean(values: Sequence[float], *, window: int) -> list[float]:
    """Mean of each value and up to `window` - 1 values before it."""
    return [
        sum(values[max(0, i - window + 1) : i + 1]) / len(values[max(0, i - window + 1) : i + 1])
        for i in range(len(values))
    ]


def write_reward_picture(path: Path, *, rewards: Sequence[float], title: str) -> None:
    """A PNG: raw mean reward per step as points, a moving mean as the line. Written beside and renamed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.0), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = list(range(1, len(rewards) + 1))
    axes.plot(steps, rewards, "o", color="#9db4cc", markersize=4, label="mean reward of the step")
    smooth = moving_mean(rewards, window=SMOOTHING_STEPS)
    axes.plot(steps, smooth, color="#1f5a96", linewidth=2.2, label=f"mean of {SMOOTHING_STEPS} steps")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("mean reward")
    axes.set_title(title)
    axes.set_ylim(min(0.0, *rewards) - 0.02, max(1.0, *rewards) + 0.02)
    axes.grid(visible=True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    beside = path.with_suffix(".partial.png")
    figure.savefig(beside)
    beside.replace(path)


def _columns(values: Sequence[float], *, width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [len(values) * i // width for i in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def _cell(eighths: float) -> str:
    if eighths <= 0:
        return " "
    return LEVELS[min(7, max(0, round(eighths) - 1))] if eighths < 8 else LEVELS[7]
