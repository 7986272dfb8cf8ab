"""`agentrl db`: the embedded database in the foreground, until SIGTERM or Ctrl-C.

`agentrl db stats | compact | export | import | prune` are in maintenance.py.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path

import uvloop
from rich.console import Console

from agentrl.cli.connect import database_dir, database_lock, guarded_server
from agentrl.cli.invocation import Invocation
from agentrl.cli.launch.supervisor import LOCK_WAIT_S
from agentrl.cli.locks import hold_lock
from agentrl.cli.maintenance import run_action
from agentrl.cli.service import with_stop_signals
from agentrl.config import RunConfig
from agentrl.errors import ConfigError, StoreError
from agentrl.store.embedded import EmbeddedServer

EXIT_POLL_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to do with a run's database; without an action, the server runs."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions")
    stats = actions.add_parser("stats", help="sizes, per collection and trajectory")
    compact = actions.add_parser("compact", help="remove what crashes left behind and nothing refers to")
    export = actions.add_parser("export", help="write a run to one file")
    restore = actions.add_parser("import", help="read such a file into an empty run")
    prune = actions.add_parser("prune", help="remove databases of evaluations and start models that are over")
    for action in (stats, compact, export):
        action.add_argument("run_name", metavar="RUN_NAME")
    prune.set_defaults(run_name=None)
    for action in (compact, prune):
        action.add_argument("--yes", action="store_true", help="remove; without it, only tell")
    for action in (export, restore):
        action.add_argument("file", metavar="FILE", type=Path)
    restore.add_argument("--as", dest="run_name", metavar="RUN_NAME", help="name of the run; default: as exported")
    for action in (stats, compact, export, restore, prune):
        action.add_argument("--config", type=Path, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        action.add_argument(
            *("--dry_run", "--dry-run"), action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )


def run(invocation: Invocation) -> int:
    """Start, say where it is, wait, stop; or do what the action says."""
    if invocation.arguments.action is not None:
        return run_action(invocation)
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
    console = Console(highlight=False, soft_wrap=True, markup=False)
    console.print(f"database ready, data in {database_dir(config)}, stop with Ctrl-C or `kill {os.getpid()}`")
    console.print(f"  {server.uri}")
    console.print('  look inside: mongosh "<that address>", then `show dbs`: one database per run')


async def _until_stopped(stop: asyncio.Event, *, server: EmbeddedServer) -> None:
    stopping = asyncio.create_task(stop.wait())
    while not stopping.done():
        if not server.is_running:
            raise StoreError(f"the database server, process {server.pid}, ended by itself; its log tells why")
        await asyncio.wait([stopping], timeout=EXIT_POLL_S)
