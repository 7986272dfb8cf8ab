"""What a finished run shows: the reward curve, where everything lies, and what to do next."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl.cli.connect import database_dir
from agentrl.config import RunConfig
from agentrl.config.load import masked_uri
from agentrl.inspector import RunProgress
from agentrl.inspector.curves import text_plot, write_reward_picture

ENDS = 5  # steps at either end whose means are compared
PLOT_HEIGHT = 8


def show_summary(console: Console, *, config: RunConfig, progress: RunProgress, uri: str) -> None:
    """Print it, and write output/<run>/reward.png."""
    rewards = progress.rewards
    console.print()
    if rewards:
        _show_curve(console, config=config, rewards=rewards)
    console.print(_places(config, uri=uri, has_picture=bool(rewards)))
    console.print()
    console.print(_next_commands(config))


def compare_ends(rewards: Sequence[float]) -> tuple[float, float]:
    """Means of the first and the last few steps."""
    width = max(1, min(ENDS, len(rewards) // 2))
    return sum(rewards[:width]) / width, sum(rewards[-width:]) / width


def _show_curve(console: Console, *, config: RunConfig, rewards: Sequence[float]) -> None:
    first, last = compare_ends(rewards)
    width = max(1, min(ENDS, len(rewards) // 2))
    console.print(
        Text.assemble(
            ("mean reward ", "bold"), f"first {width} steps ", (f"{first:.3f}", "bold"), f"  last {width} steps ",
            (f"{last:.3f}", "bold green" if last > first else "bold red"), f"  over {len(rewards)} steps",
        )
    )  # fmt: skip
    low, high = min(0.0, *rewards), max(1.0, *rewards)
    console.print(Text(text_plot(rewards, width=60, height=PLOT_HEIGHT, low=low, high=high), style="green"))
    picture = config.run.run_dir / "reward.png"
    write_reward_picture(picture, rewards=rewards, title=f"{config.run.run_name}: mean reward per optimizer step")
    console.print()


def _places(config: RunConfig, *, uri: str, has_picture: bool) -> Table:
    run_dir = config.run.run_dir
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    if has_picture:
        table.add_row("reward curve", str(run_dir / "reward.png"))
    table.add_row("metrics", str(run_dir / "metrics.jsonl"))
    table.add_row("trained model", str(run_dir / "final"))
    table.add_row("checkpoints", str(run_dir / "checkpoints"))
    table.add_row("logs", str(config.run.log_dir / f"{config.run.run_name}_*.log"))
    table.add_row("database", f"{config.run.run_name} at {masked_uri(uri)}")
    if config.store.db_connection_string is None:
        table.add_row("", f"embedded, files in {database_dir(config)}; `agentrl db` starts it again")
    table.add_row(
        "", f'mongosh "{masked_uri(uri)}" --eval \'db.getSiblingDB("{config.run.run_name}").Record.findOne()\''
    )
    return table


def _next_commands(config: RunConfig) -> Table:
    name = config.run.run_name
    table = Table.grid(padding=(0, 2))
    table.add_row(f"agentrl inspect {name}", Text("read the trajectories", style="dim"))
    table.add_row(f"agentrl eval {name}", Text("first against last policy on held-out tasks", style="dim"))
    if "tensorboard" in config.train.report_to:
        logs = config.run.run_dir / "trackers"
        table.add_row(f"tensorboard --logdir {logs}", Text("all metrics", style="dim"))
    return table
