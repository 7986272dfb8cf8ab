"""Several runs' rewards in one picture: .venv/bin/python benchmarks/reward_curves.py OUT.png RUN [RUN ...]

Reads output/RUN/metrics.jsonl; prints first-5 and last-5 means as a Markdown table.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("Agg")

WINDOW = 5


def main() -> None:
    """Draw and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--output_dir", type=Path, default=Path("output"))
    arguments = parser.parse_args()
    curves = {run: read_rewards(arguments.output_dir / run / "metrics.jsonl") for run in arguments.runs}
    draw(curves, arguments.picture)
    print("| run | first 5 steps | last 5 steps | rise |\n|---|---|---|---|")
    for run, rewards in curves.items():
        first, last = rewards[:WINDOW].mean(), rewards[-WINDOW:].mean()
        print(f"| {run} | {first:.3f} | {last:.3f} | {last - first:+.3f} |")


def read_rewards(path: Path) -> np.ndarray:
    """Mean reward of every step."""
    return np.array([json.loads(line)["reward"] for line in path.read_text(encoding="utf-8").splitlines()])


def draw(curves: dict[str, np.ndarray], picture: Path) -> None:
    """Points per step, and a line through the mean of the last WINDOW steps."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9.8, 5.2), dpi=100)
    for run, rewards in curves.items():
        steps = np.arange(1, rewards.size + 1)
        means = np.array([rewards[max(0, step - WINDOW) : step].mean() for step in steps])
        (line,) = axes.plot(steps, means, linewidth=2.5, label=f"{run}, mean of {WINDOW} steps")
        axes.plot(steps, rewards, "o", markersize=4, alpha=0.35, color=line.get_color())
    axes.set(xlabel="optimizer step", ylabel="mean reward", ylim=(-0.02, 1.02))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(picture)


if __name__ == "__main__":
    main()
