"""Counts what a test of child processes and connections must give back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import psutil


def children() -> set[int]:
    """Process ids of all descendants."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


@contextmanager
def expect_nothing_left_behind() -> Iterator[None]:
    """Inside a running loop: no process, task or file descriptor more at the end than at the start."""
    processes, tasks, files = children(), asyncio.all_tasks(), psutil.Process().num_fds()
    yield
    assert children() == processes
    assert {task for task in asyncio.all_tasks() if not task.done()} - tasks - {asyncio.current_task()} == set()
    assert psutil.Process().num_fds() <= files
