"""Whether a child still lives, as far as that can be seen from outside. Bounded liveness, not proof of progress.

    stopped     a process of its group is in the stopped state (SIGSTOP): any child, the database included
    silent      its pulse (`cli/pulse.py`) has stood still: engine, sampler, trainer; also a loop that no longer turns

Not covered: a trainer that waits for ever in its main thread while its pulse goes on. Its waits are bounded one by one.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import psutil

LONGEST_GAP_S = 2.0  # of time that counts between two looks: the machine, or the launcher, may have slept
START_LIMIT_S = 600.0  # without a first pulse: imports from a slow disk


@dataclass(slots=True, kw_only=True)
class LifeWatch:
    """Watches one life of one child. `pulse_file` None: it shows no pulse. Times are monotonic seconds."""

    pulse_file: Path | None
    limit_s: float
    looked_at: float
    _stopped_s: float = 0.0
    _silent_s: float = 0.0
    _last_pulse: float | None = None

    def look(self, now: float, *, is_stopped: bool) -> str | None:
        """Why the child counts as hung; None while it lives. `is_stopped`: whether its group is in `stopped_groups`."""
        gap_s = min(now - self.looked_at, LONGEST_GAP_S)
        self.looked_at = now
        self._stopped_s = self._stopped_s + gap_s if is_stopped else 0.0
        if self._stopped_s > self.limit_s:
            return f"was stopped for {self._stopped_s:.0f} s"
        if self.pulse_file is None:
            return None
        pulse = _modified_at(self.pulse_file)
        self._silent_s = self._silent_s + gap_s if pulse == self._last_pulse else 0.0
        self._last_pulse = pulse
        limit_s = self.limit_s if pulse is not None else max(self.limit_s, START_LIMIT_S)
        return f"showed no sign of life for {self._silent_s:.0f} s" if self._silent_s > limit_s else None


def stopped_groups(group_ids: Collection[int]) -> frozenset[int]:
    """Those of the process groups that have a process in the stopped state."""
    stopped = set()
    for process_id in psutil.pids():
        try:
            group_id = os.getpgid(process_id)
            if group_id in group_ids and psutil.Process(process_id).status() == psutil.STATUS_STOPPED:
                stopped.add(group_id)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return frozenset(stopped)


def _modified_at(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None
