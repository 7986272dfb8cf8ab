"""One trainer per run: two would delete each other's unfinished checkpoints and write the same files."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl.errors import UnavailableError

LOCK_FILE = "trainer.lock"


@contextmanager
def only_trainer(run_dir: Path) -> Iterator[None]:
    """Hold run_dir/trainer.lock, which dies with the process. Raises UnavailableError naming the holder."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / LOCK_FILE).open("a+", encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise UnavailableError(
                f"run {run_dir.name} is being trained by process {file.read().strip()}: wait for it, stop it, or "
                "choose another RUN_NAME"
            ) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
