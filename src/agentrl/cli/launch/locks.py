"""One launch per run and per data folder: an advisory lock that dies with its holders."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from agentrl.errors import UnavailableError

POLL_S = 0.1


@contextmanager
def hold_lock(path: Path, *, what: str, wait_s: float) -> Iterator[int]:
    """Hold the lock file `path` and yield its descriptor, which the guard inherits.

    If the process that took it is gone, its guard is still stopping children: that is waited for, up to `wait_s`.
    Raises UnavailableError naming `what` and the process that holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        deadline = time.monotonic() + wait_s
        while not _try_lock(descriptor):
            holder = os.pread(descriptor, 32, 0).decode().strip()
            if holder.isdigit() and psutil.pid_exists(int(holder)):
                raise UnavailableError(
                    f"{what} is in use by `agentrl launch`, process {holder}: wait for it, stop it with "
                    f"`kill {holder}`, or choose another RUN_NAME and --data_dir"
                )
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"{what}: the processes of an earlier launch did not end within {wait_s:.0f} s; lock file {path}"
                )
            time.sleep(POLL_S)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
