"""A sampler process of a fleet, to be killed: fleet_process.py URI FLEET MODEL_DIR DELAY_S. Scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from agentrl.chat import ChatFormat
from agentrl.config import RunConfig
from agentrl.fleets import FleetRun
from agentrl.rollout.fleet import run_fleet_sampler
from agentrl.rollout.parts import RunParts
from agentrl.store import open_fleet_runs, open_store
from agentrl.tools import FunctionToolbox
from agentrl.types import Recovery
from fleet_world import SlowEngine
from idle_trainer import add

MAX_RECORDS = 8


async def _sample(uri: str, fleet_name: str, model_dir: Path, delay_s: float) -> None:
    @contextlib.asynccontextmanager
    async def open_run(run: FleetRun) -> AsyncIterator[RunParts]:
        store = open_store(uri, database=run.name)
        await store.prepare()
        try:
            yield RunParts(
                config=RunConfig.model_validate(run.config),
                store=store,
                toolbox=FunctionToolbox([add], recovery=Recovery.STATELESS),
                client=SlowEngine(model_dir, delay_s=delay_s),
                chat=ChatFormat.load(model_dir),
            )
        finally:
            await store.close()

    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    fleet = open_fleet_runs(uri, fleet_name=fleet_name)
    await fleet.prepare()
    await run_fleet_sampler(fleet, open_run=open_run, max_records=MAX_RECORDS, stop=stop)
    await fleet.close()


@contextlib.contextmanager
def fleet_process(uri: str, fleet_name: str, model_dir: Path, *, delay_s: float) -> Iterator[subprocess.Popen[bytes]]:
    """A running process; stopped in order at the end, and it must then end well, unless it was killed."""
    command = [sys.executable, __file__, uri, fleet_name, str(model_dir), str(delay_s)]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        yield process
        process.terminate()
        assert process.wait(20) in {0, -signal.SIGKILL}
    finally:
        process.kill()
        process.wait(10)


if __name__ == "__main__":
    asyncio.run(_sample(sys.argv[1], sys.argv[2], Path(sys.argv[3]), float(sys.argv[4])))
