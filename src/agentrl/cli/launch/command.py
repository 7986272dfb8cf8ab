"""`agentrl launch RUN_NAME`: everything a run needs on this machine, from an empty folder to the reward curve.

    database ─► laptop set-up (only if asked for) ─► tasks ─► engine, samplers, trainer ─► watch ─► stop ─► summary

Each phase leaves a finished run as it is, so launching again continues where the last launch stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, closing
from datetime import timedelta

from rich.console import Console
from rich.text import Text

from agentrl.cli.connect import database_lock, prepared_store, reserved_port
from agentrl.cli.console import UnwindingConsole
from agentrl.cli.fresh import add_fresh_arguments, check_fresh_arguments, start_over
from agentrl.cli.invocation import Invocation
from agentrl.cli.launch.example import set_up_example
from agentrl.cli.launch.inputs import check_inputs
from agentrl.cli.launch.live import open_view, watch
from agentrl.cli.launch.phase import phase
from agentrl.cli.launch.processes import Processes, database, write_config
from agentrl.cli.launch.summary import show_summary
from agentrl.cli.launch.supervisor import LOCK_WAIT_S, Guard, Supervisor
from agentrl.cli.locks import hold_lock
from agentrl.cli.progress import ProgressReader
from agentrl.cli.service import run_interruptible
from agentrl.cli.tasks import enqueue_train_tasks, read_task_file
from agentrl.config import RunConfig
from agentrl.config.secrets import masked, masked_uri
from agentrl.errors import BudgetSpentError, StoppedByAlarmError, UnavailableError
from agentrl.inspector import RunProgress
from agentrl.store import MongoStore
from agentrl.store.embedded import answering_process

OWN_DATABASE_START_S = 180.0
CONNECT_PAUSE_S = 0.1
FORGET_AFTER = timedelta(seconds=30)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run, and whether it starts over."""
    parser.add_argument("run_name", metavar="RUN_NAME", nargs="?")
    add_fresh_arguments(parser)


def run(invocation: Invocation) -> int:
    """Launch, watch, stop. Exit code 0 when the run is complete, 4 when its budget is spent, 130 after Ctrl-C."""
    check_fresh_arguments(invocation.arguments)
    console = UnwindingConsole(highlight=False, markup=False)
    farewell = "stopping every process of the run; launching again continues it"
    run_interruptible(
        _start(invocation, console=console), announce_stop=lambda: console.print(farewell, soft_wrap=True)
    )
    return 0


async def _start(invocation: Invocation, *, console: Console) -> None:
    if invocation.arguments.fresh:
        check_inputs(invocation.config)  # before anything is moved
        await start_over(invocation.config, force=invocation.arguments.force, console=console)
    await launch(invocation.config, console=console)


async def launch(config: RunConfig, *, console: Console) -> None:
    """Run everything to the end. Raises ChildFailedError, UserError; cancellation stops all children first."""
    check_inputs(config)
    title = Text.assemble((f"agentrl launch {config.run.run_name}", "bold"), f"  output in {config.run.run_dir}")
    console.print(title, soft_wrap=True)
    with ExitStack() as stack:
        what = f"run {config.run.run_name}"
        locks = [stack.enter_context(hold_lock(config.run.run_dir / "launch.lock", what=what, wait_s=LOCK_WAIT_S))]
        if config.store.db_connection_string is None:
            what = f"the database in {config.run.data_dir}"
            locks.append(stack.enter_context(hold_lock(database_lock(config), what=what, wait_s=LOCK_WAIT_S)))
        guard = stack.enter_context(closing(Guard(lock_descriptors=locks)))
        async with Supervisor(guard=guard, hang_timeout_s=config.run.hang_timeout_s) as supervisor:
            uri = _start_database(config, supervisor=supervisor, until_the_end=stack)
            config, progress = await _run_to_completion(config, uri=uri, supervisor=supervisor, console=console)
            with phase(console, "stopping"):
                await supervisor.stop()
    check_not_stopped(config, progress=progress)
    is_spent = supervisor.is_budget_spent or progress.sampling_stopped is not None
    check_not_spent(config, progress=progress, is_spent=is_spent)
    show_summary(console, config=config, progress=progress, uri=uri)


def check_not_stopped(config: RunConfig, *, progress: RunProgress) -> None:
    """Raise StoppedByAlarmError if the trainer ended before its last step, because of the newest step's alarms."""
    alarms = progress.steps[-1].alarms if progress.steps else ()
    if progress.step >= config.train.max_steps or not alarms:
        return
    what = "; ".join(f"{alarm.name}: {alarm.message} ({', '.join(alarm.subjects)})" for alarm in alarms)
    raise StoppedByAlarmError(
        f"the stability watch ended run {config.run.run_name} after step {progress.step} of {config.train.max_steps}: "
        f"{what}. Launching again continues from its checkpoint; with --on_alarm warn alarms are told only"
    )


def check_not_spent(config: RunConfig, *, progress: RunProgress, is_spent: bool) -> None:
    """Raise BudgetSpentError if the samplers ended before the last step because nothing was left to spend."""
    if not is_spent or progress.step >= config.train.max_steps:
        return
    raise BudgetSpentError(
        f"budget_usd = {config.costs.budget_usd:g} is spent: run {config.run.run_name} ended after step "
        f"{progress.step} of {config.train.max_steps}; Records in flight are kept with their committed turns. "
        f"Launching again with a larger --budget_usd goes on; agentrl cost {config.run.run_name} shows what was spent"
    )


def _start_database(config: RunConfig, *, supervisor: Supervisor, until_the_end: ExitStack) -> str:
    if config.store.db_connection_string is not None:
        return config.store.db_connection_string
    spec, uri = database(config, port=until_the_end.enter_context(reserved_port(config)), environ=os.environ)
    supervisor.start(spec)
    return uri


async def _run_to_completion(
    config: RunConfig, *, uri: str, supervisor: Supervisor, console: Console
) -> tuple[RunConfig, RunProgress]:
    with phase(console, "database", detail=masked_uri(uri)):
        await _first_connection(config, uri=uri, supervisor=supervisor)
    config = await set_up_example(config, uri=uri, supervisor=supervisor, console=console)
    write_config(config)
    async with _open_store(config, uri=uri) as store:
        reader = ProgressReader(store=store, config=config, forget_after=FORGET_AFTER)
        progress = await reader.read()
        if progress.step >= config.train.max_steps and (config.run.run_dir / "final").is_dir():
            console.print(f"run {config.run.run_name} is complete: {progress.step} of {config.train.max_steps} steps")
            return config, progress
        await _describe_run(config, store=store)
        if not config.is_supervised:
            with phase(console, "tasks", detail=str(config.run.train_file)):
                await enqueue_train_tasks(config, store, rows=read_task_file(config, "train_file"))
        _start_processes(Processes(config=config, uri=uri, environ=os.environ), supervisor=supervisor)
        resumed = f", continuing after step {progress.step}" if progress.step else ""
        message = f"training to step {config.train.max_steps}{resumed}; Ctrl-C stops, launching again continues"
        console.print(message, soft_wrap=True)
        with open_view(console) as view:
            return config, await watch(supervisor, reader=reader, view=view)


def _start_processes(processes: Processes, *, supervisor: Supervisor) -> None:
    config = processes.config
    supervisor.start(processes.trainer())
    if config.is_supervised:
        return
    supervisor.start(processes.engine())
    for index in range(config.rollout.num_samplers):
        supervisor.start(processes.sampler(index))


async def _first_connection(config: RunConfig, *, uri: str, supervisor: Supervisor) -> None:
    """Wait until the database answers, or its process is given up.

    A database of our own may take longer than db_timeout_s to start on a busy machine: its process decides.
    """
    deadline = time.monotonic() + OWN_DATABASE_START_S
    while True:
        connecting = asyncio.create_task(_connect_once(config, uri=uri, supervisor=supervisor))  # within db_timeout_s
        try:
            while not connecting.done():
                supervisor.check()
                await asyncio.wait([connecting], timeout=0.2)
            return connecting.result()
        except UnavailableError:
            if config.store.db_connection_string is not None or time.monotonic() > deadline:
                raise
            await asyncio.sleep(CONNECT_PAUSE_S)
        finally:
            connecting.cancel()


async def _connect_once(config: RunConfig, *, uri: str, supervisor: Supervisor) -> None:
    """Raises UnavailableError if no database answers, or one of another launch where ours should."""
    if config.store.db_connection_string is None:
        answering = await asyncio.to_thread(answering_process, uri)
        if answering is None or not supervisor.has_child(answering):
            raise UnavailableError(f"the database of this launch does not answer at {masked_uri(uri)}")
    async with _open_store(config, uri=uri):
        pass


@asynccontextmanager
async def _open_store(config: RunConfig, *, uri: str) -> AsyncIterator[MongoStore]:
    store = await prepared_store(with_database(config, uri=uri))
    try:
        yield store
    finally:
        await store.close()


def with_database(config: RunConfig, *, uri: str) -> RunConfig:
    """The configuration with the database's address filled in."""
    return config.model_copy(update={"store": config.store.model_copy(update={"db_connection_string": uri})})


async def _describe_run(config: RunConfig, *, store: MongoStore) -> None:
    """The Run document: what is being run, and since when. A budget that ended the last launch may be larger now."""
    now = await store.server_time()
    known = await store.get_run()
    times = {} if known is not None else {"created_at": now}
    facts = {"run_name": config.run.run_name, "config": masked(config), "launched_at": now, "sampling_stopped": None}
    await store.put_run({**facts, **times})
