"""`--sampler_module`: the sampler class a user's file defines."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

from agentrl.errors import ConfigError
from agentrl.rollout.sampler import AsyncSampler, MCPSampler


def load_sampler(module_path: str | None) -> type[AsyncSampler]:
    """The one AsyncSampler that a .py file or dotted module defines; MCPSampler without one.

    Raises ConfigError if the module cannot be imported or defines none or several.
    """
    if module_path is None:
        return MCPSampler
    try:
        module = _from_file(Path(module_path)) if module_path.endswith(".py") else importlib.import_module(module_path)
    except (ImportError, SyntaxError, OSError) as error:
        raise ConfigError(f"sampler_module = {module_path!r} cannot be imported: {error}") from error
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


def _from_file(path: Path) -> ModuleType:
    """The module of a file, imported once per process."""
    name = "agentrl_sampler_" + path.resolve().as_posix().replace("/", "_").removesuffix(".py")
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ImportError("no such file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
