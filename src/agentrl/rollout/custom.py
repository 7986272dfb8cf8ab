"""Which sampler makes a run's Records: the one that a user's `--sampler_module` defines, else as configured."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.rollout.context import episode_starts
from agentrl.rollout.meta_sampler import MetaEpisodeSampler
from agentrl.rollout.sampler import AsyncSampler, MCPSampler
from agentrl.types import Turn
from agentrl.user_modules import import_user_module


def sampler_of(config: RunConfig) -> type[AsyncSampler]:
    """The sampler class of a run: MCPSampler, MetaEpisodeSampler where section `reflection` asks for episodes.

    Raises ConfigError, also for episodes with a sampler of the user's that makes none.
    """
    defined = load_sampler(config.rollout.sampler_module)
    if not config.reflection.is_meta:
        return defined
    if defined is MCPSampler:
        return MetaEpisodeSampler
    if not issubclass(defined, MetaEpisodeSampler):
        raise ConfigError(
            f"sampler_module = {config.rollout.sampler_module!r} with episodes = {config.reflection.episodes}, "
            f"episode_unit = {config.reflection.episode_unit}: {defined.__name__} has a loop of its own; derive it "
            "from MetaEpisodeSampler, or leave section reflection alone"
        )
    return defined


def sampler_for(sampler_class: type[AsyncSampler], *, committed: Sequence[Turn]) -> type[AsyncSampler]:
    """Who goes on with a Record: its run's sampler, unless it was begun with several episodes and those are gone.

    What was begun as a meta-episode ends as one: with the episodes it has, the one that is open being its last.
    """
    return MetaEpisodeSampler if sampler_class is MCPSampler and episode_starts(committed) else sampler_class


def load_sampler(module_path: str | None) -> type[AsyncSampler]:
    """The one AsyncSampler that a .py file or dotted module defines; MCPSampler without one.

    Raises ConfigError if the module cannot be imported or defines none or several.
    """
    if module_path is None:
        return MCPSampler
    module = import_user_module(module_path, setting="sampler_module")
    defined = [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, AsyncSampler)
        and value.__module__ == module.__name__
        and not inspect.isabstract(value)
    ]
    if len(defined) != 1:
        names = ", ".join(sampler.__name__ for sampler in defined) or "none"
        raise ConfigError(
            f"sampler_module = {module_path!r} must define one class derived from AsyncSampler with run and "
            f"evaluate_record; it defines {names}"
        )
    return defined[0]
