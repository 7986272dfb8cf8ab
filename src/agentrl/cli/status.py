"""`agentrl status RUN_NAME`: how a run is going, refreshed until Ctrl-C, or once."""

from __future__ import annotations

import argparse
import asyncio
from datetime import timedelta

import uvloop
from rich.console import Console
from rich.live import Live

from agentrl.cli.connect import open_run_store
from agentrl.cli.invocation import Invocation
from agentrl.cli.progress import ProgressReader
from agentrl.cli.service import with_stop_signals
from agentrl.config import RunConfig
from agentrl.inspector import render_status

REFRESH_S = 2.0
FLEET_AGE_S = 5.0
FORGET_AFTER = timedelta(seconds=30)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run, and whether to stay."""
    parser.add_argument("run_name", metavar="RUN_NAME", nargs="?")
    parser.add_argument("--once", action="store_true", help="print once and exit")


def run(invocation: Invocation) -> int:
    """Show the table."""
    console = Console()
    once = invocation.arguments.once or not console.is_terminal

    async def body(stop: asyncio.Event) -> None:
        await _show(invocation.config, console=console, stop=None if once else stop)

    uvloop.run(with_stop_signals(body))
    return 0


async def _show(config: RunConfig, *, console: Console, stop: asyncio.Event | None) -> None:
    async with open_run_store(config, may_start=stop is None, must_exist=True) as store:
        reader = ProgressReader(store=store, config=config, forget_after=FORGET_AFTER, fleet_age_s=FLEET_AGE_S)
        first = render_status(await reader.read(), now=await store.server_time())
        if stop is None:
            console.print(first)
            return
        with Live(first, console=console, auto_refresh=False) as live:
            while not stop.is_set():
                live.update(render_status(await reader.read(), now=await store.server_time()), refresh=True)
                await asyncio.wait([asyncio.create_task(stop.wait())], timeout=REFRESH_S)
