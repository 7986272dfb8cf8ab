"""Partial rollouts: a long Record is put down between turns and picked up again under the next policy version.

    version 3   q1 ████████ done     q2 ████ cap: put down     its slot samples q3 meanwhile
    version 4                        q2      ████ done         tokens of versions 3 and 4, each with its own

So a step does not wait for the longest Record. Nothing is lost and nothing is handed over: the group keeps its claim,
and picking up is what a takeover does, from the committed turns. A Record whose tools keep state is not put down, nor
one that could not be trained any more under the next version: its oldest token would be older than `max_staleness`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from agentrl.config import RolloutConfig
from agentrl.pacing import Pace
from agentrl.types import PolicyVersion, Turn

SHORTEST_POLL_S = 0.05
LONGEST_POLL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LegLimits:
    """How much of a Record is sampled at a stretch, its leg."""

    max_tokens: int | None
    max_s: float | None
    max_staleness: int

    @classmethod
    def from_config(cls, rollout: RolloutConfig, *, max_staleness: int) -> LegLimits | None:
        """None where Records are sampled to their end."""
        if rollout.partial_rollout_tokens is None and rollout.partial_rollout_s is None:
            return None
        return cls(
            max_tokens=rollout.partial_rollout_tokens, max_s=rollout.partial_rollout_s, max_staleness=max_staleness
        )

    def are_reached(self, turns: Sequence[Turn], *, num_before: int, elapsed_s: float) -> bool:
        """Whether the Record is put down after these turns, of which `num_before` were there before the leg."""
        leg = turns[num_before:]
        if not leg or newest_version(turns) - oldest_version(turns) >= self.max_staleness:
            return False
        num_tokens = sum(len(turn.tokens.completion_ids) for turn in leg)
        has_tokens = self.max_tokens is not None and num_tokens >= self.max_tokens
        return has_tokens or (self.max_s is not None and elapsed_s >= self.max_s)


def newest_version(turns: Sequence[Turn]) -> int:
    """The newest policy version that sampled a token of these turns."""
    return max((span.version for turn in turns for span in turn.tokens.version_spans), default=0)


def oldest_version(turns: Sequence[Turn]) -> int:
    """The oldest one: what decides how stale the Record is."""
    return min((span.version for turn in turns for span in turn.tokens.version_spans), default=0)


@dataclass(slots=True, kw_only=True)
class PutDown:
    """The Records of a process that wait for the next policy version."""

    latest_policy: Callable[[], Awaitable[PolicyVersion | None]]
    idle_grace_s: float = 2.0  # time for other groups to be claimed
    num_waiting: int = 0
    _wave: int = field(default=0, init=False)
    _idle_since: float | None = field(default=None, init=False)

    async def wait(self, *, version: int, max_wait_s: float, is_idle: Callable[[], bool]) -> None:
        """Until a policy newer than `version` is published, or for `max_wait_s`.

        Not longer than until the process has nothing else to sample: the trainer may wait for these very Records.
        """
        wave = self._wave
        pace = Pace(shortest_s=SHORTEST_POLL_S, longest_s=LONGEST_POLL_S)
        self.num_waiting += 1
        try:
            async with asyncio.timeout(max_wait_s):
                while self._wave == wave and not await self._is_newer(version):
                    await asyncio.sleep(pace.pause())
                    self._note_idleness(is_idle=is_idle())
        except TimeoutError:
            return
        finally:
            self.num_waiting -= 1

    def _note_idleness(self, *, is_idle: bool) -> None:
        """Let everybody go on who waits once nothing has been sampled for the time of grace."""
        now = asyncio.get_running_loop().time()
        self._idle_since = (now if self._idle_since is None else self._idle_since) if is_idle else None
        if self._idle_since is not None and now - self._idle_since >= self.idle_grace_s:
            self._wave += 1
            self._idle_since = None

    async def _is_newer(self, version: int) -> bool:
        policy = await self.latest_policy()
        return policy is not None and policy.version > version
