"""A trainer process for tests: `python trainer_process.py SPEC.json`, alone or under `accelerate launch`.

SPEC: {"config": RunConfig as JSON, "uri": ..., "database": ..., "kill_at": ["commit", 4] or null}. At `kill_at` (phase,
step) the process ends itself with SIGKILL: nothing is flushed, no handler runs, exactly as with `kill -9` from outside.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from agentrl.config.sections import RunConfig
from agentrl.protocols import MetricSink, TrainStore
from agentrl.store import open_store
from agentrl.telemetry import JsonlSink
from agentrl.train.loop import train


def mongo_opener(uri: str, database: str) -> Callable[[], Awaitable[TrainStore]]:
    async def opened() -> TrainStore:
        store = open_store(uri, database=database)
        await store.prepare()
        return store

    return opened


def jsonl_sinks(config: RunConfig) -> Callable[[], Sequence[MetricSink]]:
    return lambda: [JsonlSink(config.run.run_dir / "metrics.jsonl")]


def main(spec_path: str) -> None:
    spec = json.loads(Path(spec_path).read_text(encoding="utf-8"))
    config = RunConfig.model_validate(spec["config"])
    kill_at = tuple(spec["kill_at"] or ())

    def report(phase: str, step: int) -> None:
        if (phase, step) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    train(config, open_store=mongo_opener(spec["uri"], spec["database"]), sinks=jsonl_sinks(config), report=report)


if __name__ == "__main__":
    main(sys.argv[1])
