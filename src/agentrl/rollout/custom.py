"""`--sampler_module`: the sampler class a user's file defines."""

from __future__ import annotations

import inspect

from agentrl.errors import ConfigError
from agentrl.rollout.sampler import AsyncSampler, MCPSampler
from agentrl.user_modules import import_user_module


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
