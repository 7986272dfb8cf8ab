"""Processes a launch started that no process group leads to any more: known by a mark in their environment.

Two kinds: tool servers (sessions of their own) of a process that was killed and that do not notice, and all children of
a launcher that was killed together with its guard.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress

import psutil

from agentrl.config.marks import LAUNCH_MARK

POLL_S = 0.05
LAST_GRACE_S = 5.0  # to be gone after SIGKILL


def new_mark(lock_descriptors: Sequence[int]) -> str:
    """A mark for one life of a child of the launch that holds these locks."""
    return f"{'/'.join(_lock_names(lock_descriptors))}#{uuid.uuid4().hex}"


def end_life(mark: str, *, grace_s: float) -> None:
    """End what one life of a child left running."""
    _end(lambda found: found == mark, grace_s=grace_s)


def end_launches(lock_descriptors: Sequence[int], *, grace_s: float) -> int:
    """End what earlier holders of any of these locks left running; how many processes that were."""
    locks = set(_lock_names(lock_descriptors))
    return _end(lambda found: not locks.isdisjoint(found.partition("#")[0].split("/")), grace_s=grace_s)


def _lock_names(descriptors: Sequence[int]) -> list[str]:
    states = [os.fstat(descriptor) for descriptor in descriptors]
    return [f"{state.st_dev:x}.{state.st_ino:x}" for state in states]


def _end(is_ours: Callable[[str], bool], *, grace_s: float) -> int:
    """SIGTERM, then SIGKILL to what is still there after the grace. Waits for the end of both, bounded."""
    num_found = 0
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, LAST_GRACE_S)):
        deadline = time.monotonic() + wait_s
        found = _marked(is_ours)
        num_found = max(num_found, len(found))
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        while found and time.monotonic() < deadline:
            time.sleep(POLL_S)
            found = _marked(is_ours)
        if not found:
            break
    return num_found


def _marked(is_ours: Callable[[str], bool]) -> list[psutil.Process]:
    """Running processes of this user with such a mark. A zombie has no environment and is not found."""
    found = []
    for process in psutil.process_iter():
        try:
            mark = process.environ().get(LAUNCH_MARK)
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue
        if mark is not None and process.pid != os.getpid() and is_ours(mark):
            found.append(process)
    return found
