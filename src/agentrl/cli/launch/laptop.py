"""The laptop profile's set-up: tasks and a weak start model, both made on this machine and kept for the next run.

    data/laptop/train.jsonl, heldout.jsonl     assets/laptop/generate_tasks.py
    data/models/laptop-<key>/                  assets/laptop/build_start.py (random weights, demonstrations)
                                               ─► demonstrations into a database of their own
                                               ─► the ordinary trainer, supervised (assets/profiles/laptop_start.yml)

The key is a hash of everything the model depends on, the seed included. The folder appears by a rename when complete.
"""

from __future__ import annotations

from rich.console import Console

from agentrl.cli.launch.supervisor import Supervisor
from agentrl.config import RunConfig

LAPTOP_PROFILE = "laptop"
START_PROFILE = "laptop_start"


def needs_laptop_setup(config: RunConfig) -> bool:
    """Whether this run is to start from nothing."""
    return config.run.profile == LAPTOP_PROFILE and config.model.model_name_or_path is None


async def set_up_laptop(config: RunConfig, *, uri: str, supervisor: Supervisor, console: Console) -> RunConfig:
    """Make what is missing; the configuration with the start model filled in."""
    raise SystemExit(uri)
