"""`MCPScorerFactory`: scorers by name, built in or registered by the user; `score_answer` runs one safely.

    async def shorter_is_better(answer, ground_truth, scorer_config):
        return 1.0 / (1 + len(answer))

    MCPScorerFactory.register_scorer("shorter", shorter_is_better)

The third argument may be left out. A scorer that raises, hangs or returns no finite number is a ScoringError, never a
score of 0.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import math
import sys
import sysconfig
import traceback
from collections.abc import Awaitable, Callable, Mapping
from difflib import get_close_matches
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar

from agentrl.errors import ConfigError, ScoringError, UserError
from agentrl.protocols import Scorer
from agentrl.scoring.scorers import exact_match, letter_choice, math_equal, token_f1

SCORE_DEADLINE_S = 120.0
RESERVED_SCORERS = frozenset({"agentcpm", "simpleqa"})
_CANCEL_GRACE_S = 1.0
_LIBRARIES = ("<frozen ", *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib")))


class MCPScorerFactory:
    """The scorers of this process, by name."""

    _scorers: ClassVar[dict[str, Scorer]] = {
        "em": exact_match,
        "f1": token_f1,
        "math": math_equal,
        "choice": letter_choice,
    }

    @classmethod
    def register_scorer(cls, name: str, function: Callable[..., Awaitable[float]], *, replace: bool = False) -> None:
        """Make `await function(answer, ground_truth[, scorer_config])` available as `name`. Raises ConfigError."""
        _refuse_reserved(name)
        if name in cls._scorers and not replace:
            raise ConfigError(f"scorer {name!r} is registered already; choose another name or pass replace=True")
        cls._scorers[name] = _as_scorer(name, function)

    @classmethod
    def get_scorer(cls, name: str) -> Scorer:
        """The scorer of that name. Raises ConfigError naming the nearest known one."""
        _refuse_reserved(name)
        if name not in cls._scorers:
            nearest = get_close_matches(name, cls.names(), n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(cls.names())}"
            raise ConfigError(f"unknown scorer {name!r}; {hint}")
        return cls._scorers[name]

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """All scorers that can be used, sorted."""
        return tuple(sorted(cls._scorers))


async def score_answer(
    scorer: str,
    answer: str,
    ground_truth: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    deadline_s: float = SCORE_DEADLINE_S,
) -> float:
    """The score of `answer`, a finite float. Raises ScoringError; ConfigError for an unknown scorer."""
    function = MCPScorerFactory.get_scorer(scorer)
    # A task, so that whatever a user's scorer raises is an outcome to name and not an exception to catch blindly.
    task = asyncio.ensure_future(function(answer, ground_truth, config))
    try:
        await asyncio.wait({task}, timeout=deadline_s)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=_CANCEL_GRACE_S)
    if not task.done() or task.cancelled():
        raise ScoringError(f"scorer {scorer!r} gave no score within {deadline_s:g} s")
    error = task.exception()
    if error is not None:
        raise ScoringError(f"scorer {scorer!r} failed: {type(error).__name__}: {error}") from error
    return _checked_score(scorer, task.result())


def load_scorers(module_path: str) -> tuple[str, ...]:
    """Import a dotted module or a .py file that registers scorers; returns the names known afterwards.

    Raises ConfigError if it cannot be found or imported, naming file and line, or if it registers nothing.
    """
    before = set(MCPScorerFactory.names())
    module_name = _module_name(module_path)
    if module_name in sys.modules:
        return MCPScorerFactory.names()
    try:
        if module_path.endswith(".py"):
            _import_file(Path(module_path), module_name=module_name)
        else:
            importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the user's code runs here: it may raise anything
        what = " ".join(f"{type(error).__name__}: {error}".split())
        message = f"scorer_module = {module_path!r} cannot be imported: {what}{_place_of(error)}"
        raise ConfigError(message) from error
    if set(MCPScorerFactory.names()) == before:
        raise ConfigError(
            f"scorer_module = {module_path!r} registers no scorer; "
            "call MCPScorerFactory.register_scorer(name, function) at its top level"
        )
    return MCPScorerFactory.names()


def _place_of(error: BaseException) -> str:
    """The last line of the user's own code that led to it, for a message; nothing for a module that is not there."""
    if isinstance(error, SyntaxError):
        return ""  # its text says so
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename != __file__ and not frame.filename.startswith(_LIBRARIES)]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def _refuse_reserved(name: str) -> None:
    if name in RESERVED_SCORERS:
        raise UserError(
            f"scorer {name!r} is an LLM judge, which this version does not have yet; use one of em, f1, math, choice, "
            "or register your own judge under another name"
        )


def _as_scorer(name: str, function: Callable[..., Awaitable[float]]) -> Scorer:
    if not (inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)):
        raise ConfigError(f"scorer {name!r}: {function!r} is not an async function; define it with `async def`")
    signature = inspect.signature(function)
    if _accepts(signature, 3):
        return function
    if not _accepts(signature, 2):
        raise ConfigError(
            f"scorer {name!r} has signature {signature}; expected (answer, ground_truth[, scorer_config])"
        )

    async def without_config(answer: str, ground_truth: Mapping[str, Any], config: Mapping[str, Any]) -> float:
        del config
        return await function(answer, ground_truth)

    return without_config


def _accepts(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def _checked_score(scorer: str, score: object) -> float:
    if not isinstance(score, Real) or not math.isfinite(score):
        raise ScoringError(f"scorer {scorer!r} returned {score!r}, which is no finite number")
    return float(score)


def _module_name(module_path: str) -> str:
    if not module_path.endswith(".py"):
        return module_path
    return "agentrl_scorers_" + Path(module_path).resolve().as_posix().replace("/", "_").removesuffix(".py")


def _import_file(path: Path, *, module_name: str) -> None:
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ImportError("no such file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
