"""`agentrl merge-report RUN_NAME [--step N] [--json]`: tokens per layout of the rows that a run trained."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

import uvloop
from rich.console import Console

from agentrl.cli.connect import open_run_store
from agentrl.cli.invocation import Invocation, positive_int
from agentrl.config import RunConfig
from agentrl.errors import UnavailableError
from agentrl.inspector.merge_report import LayoutTokens, render_merge_report, step_layout_tokens
from agentrl.protocols import AuditStore
from agentrl.types import TrainStep

ROWS_PER_READ = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run, perhaps one step, and for whom the report is."""
    parser.add_argument("run_name", metavar="RUN_NAME", nargs="?")
    parser.add_argument("--step", type=positive_int, help="only this step; without it, all")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(invocation: Invocation) -> int:
    """Count, print and exit."""
    steps = uvloop.run(_count(invocation.config, step=invocation.arguments.step))
    if invocation.arguments.json:
        report = {str(step): tokens.as_json() for step, tokens in steps.items()}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        Console().print(render_merge_report(steps))
    return 0


async def _count(config: RunConfig, *, step: int | None) -> dict[int, LayoutTokens]:
    async with open_run_store(config, may_start=True, must_exist=True) as store:
        entries = [entry for entry in await store.list_steps() if step is None or entry.step == step]
        return await count_steps(store, _not_empty(entries, run_name=config.run.run_name, step=step))


async def count_steps(store: AuditStore, entries: Sequence[TrainStep]) -> dict[int, LayoutTokens]:
    """Tokens per layout of each step; the rows of one step are in memory at a time."""
    counted = {}
    for entry in entries:
        rows = []
        for start in range(0, len(entry.sequence_ids), ROWS_PER_READ):
            rows.extend(await store.find_sequences(entry.sequence_ids[start : start + ROWS_PER_READ]))
        counted[entry.step] = step_layout_tokens(rows, num_missing=len(entry.sequence_ids) - len(rows))
    return counted


def _not_empty(entries: Sequence[TrainStep], *, run_name: str, step: int | None) -> Sequence[TrainStep]:
    if not entries:
        wanted = "no steps" if step is None else f"no step {step}"
        raise UnavailableError(f"run {run_name} has {wanted} in its ledger; see agentrl status")
    return entries
