"""The sign of life of a child of `agentrl launch`: a file it touches every second, if its launcher asks for one.

Local, so a database that is away does not make a child look dead. From an event loop it says that the loop turns; from
a thread of the trainer, whose steps may take any time, that the process is not stopped.
"""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import suppress
from pathlib import Path

from agentrl.config.marks import PULSE_FILE

BEAT_S = 1.0


async def beat_from_loop() -> None:
    """Beat until cancelled."""
    if (path := _pulse_file()) is not None:
        while True:
            _touch(path)
            await asyncio.sleep(BEAT_S)


def beat_from_thread() -> None:
    """Beat until the process ends."""
    if (path := _pulse_file()) is not None:
        threading.Thread(target=_beat, args=(path,), name="pulse", daemon=True).start()


def _beat(path: Path) -> None:
    ticker = threading.Event()
    while not ticker.wait(BEAT_S):
        _touch(path)


def _pulse_file() -> Path | None:
    name = os.environ.get(PULSE_FILE)
    return None if name is None else Path(name)


def _touch(path: Path) -> None:
    with suppress(OSError):  # a full disk: the next beat tries again
        path.touch()
