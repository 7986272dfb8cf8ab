"""`agentrl inspect RUN_NAME [RECORD]`: the newest Records as a table, or one of them turn by turn."""

from __future__ import annotations

import argparse
import shlex

import uvloop
from rich.console import Console, Group
from rich.text import Text

from agentrl.cli.connect import open_run_store
from agentrl.cli.invocation import Invocation, positive_int
from agentrl.cli.rescore import find_version
from agentrl.config import RunConfig
from agentrl.errors import UnavailableError
from agentrl.inspector import load_trajectory, render_records, render_trajectory
from agentrl.inspector.plain import plain
from agentrl.inspector.scores import load_scores, render_scores, with_scores


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run, perhaps a Record, and what the table shows."""
    parser.add_argument("run_name", metavar="RUN_NAME", nargs="?")
    parser.add_argument("record", metavar="RECORD", nargs="?", help="id of a record; without it, a table of records")
    parser.add_argument("--limit", type=positive_int, default=20, help="records in the table")
    parser.add_argument("--split", help="only records of this split, e.g. train")
    parser.add_argument("--task", help="only records of this task")
    parser.add_argument("--scores", metavar="VERSION", help="show the scores of this version: see agentrl rescore")


def run(invocation: Invocation) -> int:
    """Print and exit."""
    uvloop.run(_inspect(invocation.config, invocation.arguments, console=Console()))
    return 0


async def _inspect(config: RunConfig, arguments: argparse.Namespace, *, console: Console) -> None:
    async with open_run_store(config, may_start=True, must_exist=True) as store:
        if arguments.record is not None:
            trajectory = await load_trajectory(store, record_id=arguments.record)
            console.print(render_trajectory(trajectory))
            calls = await store.list_calls(trajectory.record.id)
            console.print(render_scores(await load_scores(store, trajectory.record), calls))
            return
        records = await store.list_records(split=arguments.split, task_id=arguments.task, limit=arguments.limit)
        if arguments.scores is not None:
            version = find_version(arguments.scores, known=await store.count_scores())
            records = await with_scores(store, records, version=version)
    if not records:
        raise UnavailableError(f"run {config.run.run_name} has no such records yet; see agentrl status")
    console.print(render_records(records))
    hint = f"agentrl inspect {config.run.run_name} {shlex.quote(records[0].id)}   reads one of them"
    console.print(Group(Text(), plain(hint, style="dim")), soft_wrap=True)
