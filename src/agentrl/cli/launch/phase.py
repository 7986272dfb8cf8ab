"""One phase of a launch on the console."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.status import Status
from rich.text import Text


@contextmanager
def phase(console: Console, title: str, *, detail: str = "") -> Iterator[Status]:
    """Show that something is going on, then that it is done and how long it took. The status may be updated."""
    started = time.monotonic()
    with console.status(Text(f"{title} {detail}")) as status:
        yield status
    seconds = f" {time.monotonic() - started:5.1f} s  "
    console.print(Text.assemble(("✓ ", "green"), f"{title:<12}", seconds, (detail, "dim")), soft_wrap=True)
