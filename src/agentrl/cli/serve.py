"""`agentrl serve RUN_NAME`: the inference service: an embedded engine, or the registrar of the SGLang servers given."""

from __future__ import annotations

import argparse
import asyncio

from agentrl.cli.connect import open_run_store
from agentrl.cli.invocation import Invocation
from agentrl.cli.service import run_service, until_stopped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run."""
    parser.add_argument("run_name", metavar="RUN_NAME", nargs="?")


def run(invocation: Invocation) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    from agentrl.inference.serve import serve

    config = invocation.config

    async def body(stop: asyncio.Event) -> None:
        async with open_run_store(config) as store:
            await until_stopped(serve(config, store), stop=stop)

    return run_service(config, process_name="engine", body=body)
