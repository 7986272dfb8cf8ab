"""`agentrl serve RUN_NAME`, or `--fleet_name FLEET`: an embedded engine, or registrars of the SGLang servers given."""

from __future__ import annotations

import argparse
import asyncio

from agentrl.cli.connect import open_run_store, prepared_store
from agentrl.cli.fleet_connect import open_fleet, with_run_name
from agentrl.cli.invocation import Invocation
from agentrl.cli.service import run_service, until_stopped
from agentrl.protocols import Store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run."""
    parser.add_argument("run_name", metavar="RUN_NAME", nargs="?")


def run(invocation: Invocation) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    from agentrl.inference.serve import serve, serve_fleet

    config = invocation.config

    async def open_run(run_name: str) -> Store:
        return await prepared_store(with_run_name(config, run_name))

    async def body(stop: asyncio.Event) -> None:
        if config.run.fleet_name is not None:
            async with open_fleet(config) as fleet:
                await until_stopped(serve_fleet(config, fleet, open_run_store=open_run), stop=stop)
            return
        async with open_run_store(config) as store:
            await until_stopped(serve(config, store), stop=stop)

    return run_service(config, process_name="engine", body=body)
