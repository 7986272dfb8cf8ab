"""`agentrl cost RUN_NAME [--estimate] [--json]`: what the calls of a run did cost, and what it will cost."""

from __future__ import annotations

import argparse
import json
import sys

import uvloop
from rich.console import Console

from agentrl.cli.connect import open_run_store
from agentrl.cli.invocation import Invocation
from agentrl.config import RunConfig
from agentrl.inspector.costs import CostReport, load_costs, render_costs, render_estimate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run, and what to show of it."""
    parser.add_argument("run_name", metavar="RUN_NAME", nargs="?")
    parser.add_argument("--estimate", action="store_true", help="only what the whole run will cost")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(invocation: Invocation) -> int:
    """Add up and print."""
    report = uvloop.run(_load(invocation.config))
    console = Console(highlight=False)
    if invocation.arguments.json:
        sys.stdout.write(json.dumps(report.as_json(), indent=2) + "\n")
        return 0
    if not invocation.arguments.estimate:
        console.print(render_costs(report))
    console.print(render_estimate(report), soft_wrap=True)
    return 0


async def _load(config: RunConfig) -> CostReport:
    async with open_run_store(config, may_start=True, must_exist=True) as store:
        return await load_costs(store, config=config)
