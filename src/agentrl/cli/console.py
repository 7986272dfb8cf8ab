"""The console of commands with children: a reader that left is an error to unwind from, not an exit on the spot."""

from __future__ import annotations

from rich.console import Console


class UnwindingConsole(Console):
    """Raises BrokenPipeError when its output is closed, where rich would end the process inside the event loop."""

    def on_broken_pipe(self) -> None:
        """Called by rich while it handles the BrokenPipeError."""
        raise BrokenPipeError
