"""metrics.jsonl: one JSON object per optimizer step, each step exactly once, however often a run is resumed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path


class JsonlSink:
    """A MetricSink that appends `{"step": 3, "reward": 0.4, ...}` lines to a file; one writer per file.

    Writing a step that the file already has, or has gone beyond, first removes it and all later ones (a resume repeats
    them), and a line that a kill or a power cut left half-written. Numbers JSON cannot hold (NaN, infinity) become
    null.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("a", encoding="utf-8")
        self._last_step: int | None = None  # of the file; unknown before the first write

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one step; on disk when it returns."""
        if self._last_step is None or step <= self._last_step:
            self._keep_steps_before(step)
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._last_step = step

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _keep_steps_before(self, step: int) -> None:
        """Cut the file after the last whole line of an earlier step: lines are in step order."""
        size = 0
        with self._path.open("rb") as lines:
            for line in lines:
                known_step = _step_of(line)
                if known_step is None or known_step >= step:
                    break
                size += len(line)
        self._file.truncate(size)


def _step_of(line: bytes) -> int | None:
    """The step of a whole line; None for one that was not written to its end."""
    if not line.endswith(b"\n"):
        return None
    try:
        step: int = json.loads(line)["step"]
    except ValueError:
        return None
    return step
