"""What users write in Python: modules named in a setting (scorers, samplers, losses), and calls of their functions.

Whatever such a function raises is an outcome of that call, and never the end of the process.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Final, TypeVar

from agentrl.errors import ConfigError

T = TypeVar("T")

_MAX_SHOWN_CHARS = 500
_OURS: Final = str(Path(__file__).parent)
_LIBRARIES: Final = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<frozen", _OURS)


def import_user_module(module: str, *, setting: str) -> ModuleType:
    """The dotted module, or the module of a .py file, imported once per process.

    The user's code runs here and may raise anything: every failure is a ConfigError of one line that names the
    setting, what was raised, and the file and line.
    """
    try:
        return _module_of_file(Path(module)) if module.endswith(".py") else importlib.import_module(module)
    except (Exception, SystemExit) as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{setting} = {module!r} cannot be imported: {what}{place_in_user_code(error)}") from error


def is_imported(module: str) -> bool:
    """Whether this process has the module already."""
    return (_file_module_name(Path(module)) if module.endswith(".py") else module) in sys.modules


def _module_of_file(path: Path) -> ModuleType:
    name = _file_module_name(path)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ImportError("no such file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _file_module_name(path: Path) -> str:
    return "agentrl_user_" + hashlib.sha256(path.resolve().as_posix().encode()).hexdigest()[:16]


def place_in_user_code(error: BaseException) -> str:
    """The last line of the user's own code that led to an error; nothing for a module that is not there."""
    if isinstance(error, SyntaxError):
        return ""  # its text says so
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


class UserFunctionError(Exception):
    """A user's function raised what must not go through an event loop; the message names it."""


async def without_exit(work: Awaitable[T]) -> T:
    """What `work` gives. An exit raised in it, which would end the event loop, becomes a UserFunctionError."""
    try:
        return await work
    except SystemExit as error:
        raise UserFunctionError(described(error)) from None


def without_end(function: Callable[[], T]) -> Callable[[], T]:
    """`function`, to be called in a thread: what ends iterations, threads or processes becomes a UserFunctionError."""

    def call() -> T:
        try:
            return function()
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, StopIteration):
                raise
            raise UserFunctionError(described(error)) from None

    return call


def described(error: BaseException) -> str:
    """Type and message of what a user's code raised, bounded in length, whatever its `__str__` does."""
    if isinstance(error, UserFunctionError):
        return str(error)
    try:
        message = str(error)
    except Exception:  # noqa: BLE001  the exception is the user's, and so is its text
        message = "its message cannot be shown"
    text = f"{type(error).__name__}: {message[:_MAX_SHOWN_CHARS]}"
    return text.encode("utf-8", "replace").decode("utf-8")
