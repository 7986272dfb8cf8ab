"""Profiles that need no model and no task file: which scripts of assets/laptop make both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentrl.config import RunConfig
from agentrl.config.load import ASSETS_DIR, load_config

SCRIPTS: Final = ASSETS_DIR / "laptop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """What a profile's inputs are made by."""

    generator: Path  # writes train_file and eval_file
    builder: Path  # writes random weights and demonstrations
    start_profile: str  # of the training on the demonstrations


EXAMPLES: Final[Mapping[str, Example]] = {
    "laptop": Example(
        generator=SCRIPTS / "generate_tasks.py", builder=SCRIPTS / "build_start.py", start_profile="laptop_start"
    ),
    "mr_search_laptop": Example(
        generator=SCRIPTS / "mr_generate_tasks.py",
        builder=SCRIPTS / "mr_build_start.py",
        start_profile="mr_search_laptop_start",
    ),
}


def example_of(config: RunConfig) -> Example | None:
    """The example whose profile this configuration uses."""
    return EXAMPLES.get(config.run.profile or "")


def is_made_by_profile(config: RunConfig, name: str) -> bool:
    """Whether a file of the profile's own choice is not there yet; a user's own file is never made up."""
    if example_of(config) is None or name not in {"train_file", "eval_file"}:
        return False
    profile = load_config(profile=config.run.profile, config_file=None, environ={}, argv_flags=[])
    given, promised = config.run.model_dump()[name], profile.run.model_dump()[name]
    return given is not None and given == promised and not given.is_file()
