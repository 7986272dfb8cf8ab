"""Functions that users register as scorers: whatever they raise, return or never finish is an outcome, not a crash.

A function without `async` runs in a daemon thread of its own: one that never returns holds up neither the scorers after
it nor the end of the process.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, SupportsFloat, TypeVar, cast

from agentrl.errors import ConfigError, ScoringError
from agentrl.protocols import Scorer
from agentrl.scores import LARGEST_SCORE, is_score
from agentrl.user_modules import without_end

T = TypeVar("T")


def as_scorer(name: str, function: Callable[..., Awaitable[float] | float]) -> Scorer:
    """`function(answer, ground_truth[, scorer_config])`, async or not, as a Scorer. Raises ConfigError."""
    signature = inspect.signature(function)
    with_config = _accepts(signature, 3)
    if not with_config and not _accepts(signature, 2):
        raise ConfigError(
            f"scorer {name!r} has signature {signature}; expected (answer, ground_truth[, scorer_config])"
        )
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    if is_async and with_config:
        return cast("Scorer", function)

    async def scorer(answer: str, ground_truth: Mapping[str, Any], config: Mapping[str, Any]) -> float:
        arguments = (answer, ground_truth, config) if with_config else (answer, ground_truth)
        result: Awaitable[float] | float = (
            function(*arguments) if is_async else await _in_own_thread(lambda: function(*arguments))
        )
        return await result if inspect.isawaitable(result) else result

    scorer.__wrapped__ = function  # type: ignore[attr-defined]  # for the version: the source that decides
    scorer.__module__ = getattr(function, "__module__", "") or ""
    return scorer


def checked_score(scorer: str, score: object) -> float:
    """What a scorer returned as a float: numbers of any library will do. Raises ScoringError naming the scorer."""
    try:
        number = float(score) if isinstance(score, SupportsFloat) else None
    except Exception:  # noqa: BLE001  the number is the user's, and so is its conversion
        number = None
    if number is None or not is_score(number):
        shown = repr(score)[:80] if isinstance(score, str | int | float | None) else f"a {type(score).__name__}"
        raise ScoringError(
            f"scorer {scorer!r} returned {shown}, which is no finite number up to {LARGEST_SCORE:g} in size"
        )
    return number


async def _in_own_thread(function: Callable[[], T]) -> T:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[tuple[T | None, Exception | None]] = loop.create_future()

    def deliver(result: T | None, error: Exception | None) -> None:
        if not ended.done():
            ended.set_result((result, error))

    def run() -> None:
        result: T | None = None
        error: Exception | None = None
        try:
            result = without_end(function)()
        except Exception as raised:  # noqa: BLE001  whatever it is, it is handed to who waits
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, result, error)

    threading.Thread(target=run, name="scorer", daemon=True).start()
    returned, raised = await ended
    if raised is not None:
        raise raised
    return returned  # type: ignore[return-value]  # the function's own None is a T, too


def _accepts(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True
