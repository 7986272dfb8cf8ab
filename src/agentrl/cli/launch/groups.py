"""Ending process groups that this launch started: politely first, for good after a bounded time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection

import psutil

POLL_S = 0.05


def end_groups(
    group_ids: Collection[int], *, grace_s: float, while_waiting: Callable[[], object] = lambda: None
) -> None:
    """SIGTERM every group, wait up to `grace_s` until no process of them runs, then SIGKILL what is left."""
    _signal(group_ids, signal.SIGTERM)
    if _all_gone(group_ids, within_s=grace_s, while_waiting=while_waiting):
        return
    _signal(group_ids, signal.SIGKILL)
    _all_gone(group_ids, within_s=grace_s, while_waiting=while_waiting)


def running_members(group_ids: Collection[int]) -> list[int]:
    """Ids of the processes in these groups. A zombie only waits to be collected and does not count."""
    members = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) in group_ids and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return members


def _all_gone(group_ids: Collection[int], *, within_s: float, while_waiting: Callable[[], object]) -> bool:
    deadline = time.monotonic() + within_s
    while running_members(group_ids):
        if time.monotonic() > deadline:
            return False
        while_waiting()
        time.sleep(POLL_S)
    return True


def _signal(group_ids: Collection[int], number: signal.Signals) -> None:
    for group_id in group_ids:
        try:
            os.killpg(group_id, number)
        except ProcessLookupError:
            continue
