"""What a finished run shows: the reward curve, where everything lies, and what to do next."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from agentrl.cli.connect import database_dir
from agentrl.config import RunConfig
from agentrl.config.secrets import masked_uri
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
    for label, value in [*_places(config, uri=uri, has_picture=bool(rewards)), ("", ""), *_next_commands(config)]:
        console.print(Text.assemble((f"{label:<14}", "dim"), value), soft_wrap=True)  # whole lines can be copied


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


def _places(config: RunConfig, *, uri: str, has_picture: bool) -> list[tuple[str, str]]:
    run_dir, name = config.run.run_dir, config.run.run_name
    picture = [("reward curve", str(run_dir / "reward.png"))] if has_picture else []
    embedded = [("", f"embedded, files in {database_dir(config)}; `agentrl db` starts it again")]
    return [
        *picture,
        ("metrics", str(run_dir / "metrics.jsonl")),
        ("trained model", str(run_dir / "final")),
        ("checkpoints", str(run_dir / "checkpoints")),
        ("logs", str(config.run.log_dir / f"{name}_*.log")),
        ("database", f"{name} at {masked_uri(uri)}"),
        *(embedded if config.store.db_connection_string is None else []),
        ("", f'mongosh "{masked_uri(uri)}" --eval \'db.getSiblingDB("{name}").Record.findOne()\''),
    ]


def _next_commands(config: RunConfig) -> list[tuple[str, str]]:
    name = config.run.run_name
    trackers = config.run.run_dir / "trackers"
    tensorboard = (
        [("all metrics", f"tensorboard --logdir {trackers}")] if "tensorboard" in config.train.report_to else []
    )
    evaluation = [("evaluate", f"agentrl eval {name}")] if config.run.eval_file is not None else []
    return [("read on", f"agentrl inspect {name}"), *evaluation, *tensorboard]
