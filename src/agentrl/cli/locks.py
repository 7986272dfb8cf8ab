"""Advisory locks that die with their holders: one launch per run, one database server per data folder."""

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
    """Hold the lock file `path` and yield its descriptor, which a guard process may inherit.

    If the process that took it is gone, its guard is still stopping children: that is waited for, up to `wait_s`.
    Raises UnavailableError naming `what` and the process that holds it.
    """
    deadline = time.monotonic() + wait_s
    while (descriptor := try_lock(path)) is None:
        holder = path.read_text(encoding="ascii").strip()
        if holder.isdigit() and psutil.pid_exists(int(holder)):
            raise UnavailableError(
                f"{what} is in use by process {holder}: wait for it, stop it with `kill {holder}`, or choose another "
                "RUN_NAME and --data_dir"
            )
        if time.monotonic() > deadline:
            raise UnavailableError(f"{what}: what an earlier launch started did not end within {wait_s:.0f} s ({path})")
        time.sleep(POLL_S)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def try_lock(path: Path) -> int | None:
    """Take the lock, with this process's id in the file; closing the descriptor frees it. None: another holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode("ascii"), 0)
    return descriptor
