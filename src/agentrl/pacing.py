"""How long to wait between two looks at the database: short while work flows, long when nothing happens for long.

Whoever waits looks again after a time that grows to `longest_s`, and beyond that only as a thirtieth of the time that
nothing happened: a wait is lengthened by 3 % at most. An idle process sends about one command a second: a look that
takes several is taken as many times less often, and heartbeats (every 5 s) find room between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

IDLE_POLL_S: Final = 1.3  # seconds per command of a look
_GROWTH: Final = 1.5
_QUIET_SHARE: Final = 1 / 30
_SHORTEST_SILENCE_S: Final = 15.0
_MISSED_HEARTBEATS: Final = 3


def longest_silence_s(heartbeat_s: float) -> float:
    """Seconds without a heartbeat after which an inference service is left alone."""
    return max(_SHORTEST_SILENCE_S, _MISSED_HEARTBEATS * heartbeat_s)


@dataclass(slots=True, kw_only=True)
class Pace:
    """The pauses of one loop. Pure: `pause` hands out the next one and counts it as quiet time."""

    shortest_s: float
    longest_s: float  # while work flows
    _next_s: float = 0.0
    _quiet_s: float = 0.0

    def reset(self) -> None:
        """Something happened."""
        self._next_s = self._quiet_s = 0.0

    def pause(self, *, num_commands: int = 1) -> float:
        """Seconds until the next look, if nothing happens before. `num_commands`: what the last look took."""
        flowing_s = max(self._next_s, self.shortest_s)
        self._next_s = min(flowing_s * _GROWTH, self.longest_s)
        pause_s = max(flowing_s, min(self._quiet_s * _QUIET_SHARE, num_commands * IDLE_POLL_S))
        self._quiet_s += pause_s
        return pause_s
