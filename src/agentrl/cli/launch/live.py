"""Watching a run until its trainer is done: a live view on a terminal, one plain line per step elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from agentrl.cli.launch.supervisor import Supervisor
from agentrl.cli.progress import READ_COMMANDS, ProgressReader
from agentrl.config import RunConfig
from agentrl.errors import StoreError
from agentrl.inspector import RunProgress, render_progress
from agentrl.inspector.progress import describe_step
from agentrl.pacing import Pace
from agentrl.types import TaskStatus

REFRESH_S = 0.7  # of a run that moves; one that does not is read less and less often, its processes watched on


class View(Protocol):
    """Something that shows progress."""

    def show(self, progress: RunProgress) -> None:
        """Show the newest look."""
        ...

    def trouble(self, message: str) -> None:
        """Say why there is no look."""
        ...


async def watch(supervisor: Supervisor, *, reader: ProgressReader, view: View) -> RunProgress:
    """Show progress until the trainer has ended the run, or the budget is spent and trained on; the last look.

    Raises ChildFailedError when a process cannot be kept alive. A database that does not answer is waited for.
    """
    seen: tuple[int, int] | None = None
    pace = Pace(shortest_s=REFRESH_S, longest_s=REFRESH_S)
    while True:
        is_done = supervisor.check()
        try:
            progress = await reader.read(num_restarts=supervisor.restarts.total())
        except StoreError as error:
            view.trouble(str(error))
            await asyncio.sleep(REFRESH_S)
            continue
        moved = (progress.step, progress.tasks.get(TaskStatus.SETTLED, 0))
        if moved != seen:
            supervisor.note_progress()
            pace.reset()
            seen = moved
        view.show(progress)
        if is_done or (supervisor.is_budget_spent and not _may_train_on(progress, config=reader.config)):
            return progress
        await _watch_processes(supervisor, for_s=pace.pause(num_commands=READ_COMMANDS))


def _may_train_on(progress: RunProgress, *, config: RunConfig) -> bool:
    """Whether the trainer has groups for another step, or is at one: its groups count as settled until it commits."""
    if config.algo.max_trained_count > 1:
        return False  # groups stay settled after their first step, so nothing tells
    return progress.tasks.get(TaskStatus.SETTLED, 0) >= config.algo.tasks_per_step


async def _watch_processes(supervisor: Supervisor, *, for_s: float) -> None:
    """Wait for the next look, or until the trainer has ended the run. Raises ChildFailedError."""
    deadline = time.monotonic() + for_s
    await asyncio.sleep(min(for_s, REFRESH_S))
    while (left_s := deadline - time.monotonic()) > 0 and not supervisor.check():  # noqa: ASYNC110 (an exit sets no event)
        await asyncio.sleep(min(left_s, REFRESH_S))


@contextmanager
def open_view(console: Console) -> Iterator[View]:
    """The view that fits the console."""
    if not console.is_terminal:
        yield PlainView(console)
        return
    with Live(Text("waiting for the first step", style="dim"), console=console, auto_refresh=False) as live:
        yield LiveView(live)


class LiveView:
    """Four lines that stay in place."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def show(self, progress: RunProgress) -> None:
        """Redraw."""
        self._live.update(render_progress(progress), refresh=True)

    def trouble(self, message: str) -> None:
        """Replace the view by the reason."""
        self._live.update(Text(message, style="red"), refresh=True)


class PlainView:
    """One line per step; for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: int | None = None

    def show(self, progress: RunProgress) -> None:
        """Print the steps that are new since the first look."""
        if self._shown is None:
            self._shown = len(progress.steps)
        for count in range(self._shown + 1, len(progress.steps) + 1):
            self._console.print(describe_step(progress.up_to(count)), soft_wrap=True)
        self._shown = len(progress.steps)

    def trouble(self, message: str) -> None:
        """Print the reason."""
        self._console.print(message, soft_wrap=True)
