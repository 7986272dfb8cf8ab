"""Waiting for a database that is away: whether, and what the log says meanwhile."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

logger = logging.getLogger(__name__)

SAY_EVERY_S: Final = 10.0


class Outage:
    """One per connection: many operations find the same server away, the log says it once every ten seconds.

    Until `outlast` is called nothing is waited out, and nothing said.
    """

    def __init__(self, database: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._clock = clock
        self._stop: asyncio.Event | None = None
        self._began_at: float | None = None
        self._said_at = float("-inf")

    def outlast(self, stop: asyncio.Event) -> None:
        """From now on, wait for the server as long as it takes, or until `stop` is set."""
        self._stop = stop

    @property
    def is_outlasted(self) -> bool:
        """Whether an operation that finds the server away is to go on trying."""
        return self._stop is not None and not self._stop.is_set()

    @property
    def is_given_up(self) -> bool:
        """Whether this process is to end: what waits now need not use its time up."""
        return self._stop is not None and self._stop.is_set()

    def note(self, error: BaseException) -> None:
        """An operation found the server away."""
        if not self.is_outlasted:
            return
        now = self._clock()
        if self._began_at is None:
            self._began_at = now
        if now - self._said_at >= SAY_EVERY_S:
            self._said_at = now
            away_s = now - self._began_at
            state = f"has not answered for {away_s:.0f} s" if away_s >= 1 else "does not answer"
            logger.warning("%s %s: waiting for it (%s)", self._database, state, _first_line(error))

    def end(self) -> None:
        """An operation was answered."""
        if self._began_at is None:
            return
        logger.warning("%s answers again after %.0f s", self._database, self._clock() - self._began_at)
        self._began_at, self._said_at = None, float("-inf")


def _first_line(error: BaseException) -> str:
    """What happened, without the driver's description of the whole cluster."""
    return str(error).partition("\n")[0].partition(" (configured timeouts")[0]
