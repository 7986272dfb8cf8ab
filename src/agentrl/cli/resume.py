"""`agentrl resume RUN_NAME`: let a trainer go on that waits after an alarm (`--on_alarm pause`)."""

from __future__ import annotations

import argparse
import getpass
import socket
import sys

import uvloop

from agentrl.algo.watch import resumed_steps
from agentrl.cli.connect import open_run_store
from agentrl.cli.invocation import Invocation
from agentrl.config import RunConfig
from agentrl.errors import UnavailableError
from agentrl.protocols import Store
from agentrl.types import StepStatus, TrainStep


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run."""
    parser.add_argument("run_name", metavar="RUN_NAME", nargs="?")


def run(invocation: Invocation) -> int:
    """Write it down and say so."""
    step = uvloop.run(_resume(invocation.config))
    alarms = ", ".join(f"{alarm.name} ({alarm.message})" for alarm in step.alarms)
    sys.stdout.write(f"training goes on after step {step.step}, in spite of {alarms}\n")
    return 0


async def _resume(config: RunConfig) -> TrainStep:
    async with open_run_store(config, may_start=True, must_exist=True) as store:
        return await resume(store, by=f"{getpass.getuser()}@{socket.gethostname()}")


async def resume(store: Store, *, by: str) -> TrainStep:
    """Add to the Run document that `by` saw the alarms of the newest step; returns that step.

    Raises UnavailableError if that step has no alarm, or was resumed before: then nothing waits.
    """
    run = await store.get_run() or {}
    committed = [step for step in await store.list_steps() if step.status is StepStatus.COMMITTED]
    newest = committed[-1] if committed else None
    if newest is None or not newest.alarms or newest.step in resumed_steps(run):
        where = "there is no step yet" if newest is None else f"its newest step is {newest.step}"
        raise UnavailableError(f"no trainer waits for a resume: {where}, without an alarm that nobody has seen")
    entry = {"step": newest.step, "by": by, "at": (await store.server_time()).isoformat()}
    await store.put_run({"resumed": [*run.get("resumed", ()), entry]})
    return newest
