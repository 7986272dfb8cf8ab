"""Experiment trackers (TensorBoard, Weights & Biases, SwanLab, Trackio) as one more MetricSink, through Accelerate."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from agentrl.errors import ConfigError

KNOWN_TRACKERS = ("tensorboard", "wandb", "swanlab", "trackio")


def parse_trackers(report_to: str) -> list[str]:
    """Tracker names of `report_to`. Raises ConfigError for an unknown one, or one whose package is not installed."""
    names = [name.strip() for name in report_to.split(",") if name.strip()]
    names = [] if names == ["none"] else names
    for name in names:
        if name not in KNOWN_TRACKERS:
            raise ConfigError(f"report_to = {name!r}: unknown; choose from {', '.join(KNOWN_TRACKERS)} or none")
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"report_to = {name}: the package is not installed; run `pip install {name}`")
    return names


class TrackerSink:
    """Sends each step's metrics to the trackers Accelerate was given. Rank 0 only."""

    def __init__(self, accelerator: Accelerator, *, run_name: str, first_step: int) -> None:
        self._accelerator = accelerator
        # TensorBoard hides what an interrupted run logged from the step that is repeated on.
        accelerator.init_trackers(run_name, init_kwargs={"tensorboard": {"purge_step": first_step}})

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step."""
        self._accelerator.log(dict(metrics), step=step)

    def close(self) -> None:
        """Flush and finish the trackers."""
        self._accelerator.end_training()


def tracker_arguments(names: Sequence[str], *, run_dir: Path) -> dict[str, Any]:
    """What Accelerator must be told at construction."""
    return {"log_with": list(names), "project_dir": str(run_dir / "trackers")} if names else {}
