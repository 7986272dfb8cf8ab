"""Bounds on a Record and on a turn that do not run while the store is waited for.

A database that is away for an hour must not turn every Record in flight into a timeout: waiting for it has bounds of
its own (store/connection.py), and what a Record may take is meant for engine, tools and scorer.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar


class _Deadline:
    """One bound, and how many waits for the store hold it up at the moment."""

    def __init__(self, timeout: asyncio.Timeout) -> None:
        self._timeout = timeout
        self._num_holds = 0
        self._left_s = 0.0

    def left_s(self) -> float:
        when = self._timeout.when()
        return self._left_s if when is None else when - asyncio.get_running_loop().time()

    def hold(self) -> None:
        when = self._timeout.when()
        if self._num_holds == 0 and when is not None and not self._timeout.expired():
            self._left_s = when - asyncio.get_running_loop().time()
            self._timeout.reschedule(None)
        self._num_holds += 1

    def go_on(self) -> None:
        self._num_holds -= 1
        if self._num_holds == 0 and self._timeout.when() is None:
            self._timeout.reschedule(asyncio.get_running_loop().time() + self._left_s)


_running: ContextVar[tuple[_Deadline, ...]] = ContextVar("deadlines", default=())


@asynccontextmanager
async def deadline(limit_s: float) -> AsyncIterator[None]:
    """`asyncio.timeout`, except that its clock stands still inside `stopped_clock`, in child tasks too."""
    async with asyncio.timeout(limit_s) as timeout:
        token = _running.set((*_running.get(), _Deadline(timeout)))
        try:
            yield
        finally:
            _running.reset(token)


@contextmanager
def stopped_clock() -> Iterator[None]:
    """Around a store operation: the surrounding deadlines do not run meanwhile."""
    held = _running.get()
    for running in held:
        running.hold()
    try:
        yield
    finally:
        for running in held:
            running.go_on()


def time_left_s() -> float:
    """Seconds until the first of the surrounding deadlines; infinite without one."""
    return min((running.left_s() for running in _running.get()), default=math.inf)
