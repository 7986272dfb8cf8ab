"""How long work that is done waits for a judge that is away.

    outage      ████████████████████
    asked       x  x   x     x       ✓      pauses grow from half a second to half a minute
    Record      running, all its turns committed: a takeover asks as well

A Record is not ended while it waits, so its group is settled with the verdict or, when the patience is over, without.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from agentrl.pacing import Pace

SHORTEST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0


@dataclass(slots=True, kw_only=True)
class Patience:
    """The pauses of one wait, together at most `limit_s`, counted from the first one."""

    limit_s: float
    _pace: Pace = field(default_factory=lambda: Pace(shortest_s=SHORTEST_PAUSE_S, longest_s=LONGEST_PAUSE_S))
    _ends_at: float | None = None

    async def wait(self) -> bool:
        """Pause before the next try; False, at once, when the time is over."""
        now = asyncio.get_running_loop().time()
        self._ends_at = now + self.limit_s if self._ends_at is None else self._ends_at
        left_s = self._ends_at - now
        if left_s <= 0:
            return False
        await asyncio.sleep(min(self._pace.pause(), left_s))
        return True
