"""`agentrl db`: the embedded database in the foreground, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import os

import uvloop
from rich.console import Console

from agentrl.cli.connect import database_dir, database_lock, guarded_server
from agentrl.cli.invocation import Invocation
from agentrl.cli.locks import hold_lock
from agentrl.cli.service import with_stop_signals
from agentrl.config import RunConfig
from agentrl.errors import ConfigError, StoreError
from agentrl.store.embedded import EmbeddedServer

LOCK_WAIT_S = 60.0
EXIT_POLL_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Nothing of its own: --data_dir and --db_port are settings."""


def run(invocation: Invocation) -> int:
    """Start, say where it is, wait, stop."""
    config = invocation.config
    if config.store.db_connection_string is not None:
        raise ConfigError("db_connection_string is set: `agentrl db` is for when there is no other database; remove it")
    what = f"the database in {config.run.data_dir}"
    log_path = config.run.log_dir / "database.log"
    with (
        hold_lock(database_lock(config), what=what, wait_s=LOCK_WAIT_S) as lock,
        guarded_server(config, log_path=log_path, lock_descriptor=lock) as server,
    ):
        _announce(config, server)
        uvloop.run(with_stop_signals(lambda stop: _until_stopped(stop, server=server)))
    return 0


def _announce(config: RunConfig, server: EmbeddedServer) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"database ready, data in {database_dir(config)}, stop with Ctrl-C or `kill {os.getpid()}`")
    console.print(f"  {server.uri}")
    console.print('  look inside: mongosh "<that address>", then `show dbs`: one database per run')


async def _until_stopped(stop: asyncio.Event, *, server: EmbeddedServer) -> None:
    stopping = asyncio.create_task(stop.wait())
    while not stopping.done():
        if not server.is_running:
            raise StoreError(f"the database server, process {server.pid}, ended by itself; its log tells why")
        await asyncio.wait([stopping], timeout=EXIT_POLL_S)
