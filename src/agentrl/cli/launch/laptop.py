"""The laptop profile's set-up: tasks and a weak start model, both made on this machine and kept for the next run."""

from __future__ import annotations

from agentrl.config import RunConfig

LAPTOP_PROFILE = "laptop"


def needs_laptop_setup(config: RunConfig) -> bool:
    """Whether this run is to start from nothing."""
    return config.run.profile == LAPTOP_PROFILE and config.model.model_name_or_path is None
