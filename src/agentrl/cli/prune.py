"""`agentrl db prune`: databases that served a purpose of their own, and are over.

    RUN-eval-v<version>    which engine serves a version that is evaluated; `agentrl eval` drops it, unless it is killed
    laptop-<key>           the training of an example's start model, which is in DATA_DIR/models/laptop-<key>

Only such a database: one that holds a Task, a Record or a call is a run, whatever its name, and never touched; nor is
one whose processes gave a sign of life in the last minute, or a start model's that is not finished.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Final

from rich.console import Console
from rich.filesize import decimal

from agentrl.cli.connect import connection_string, database_dir, open_run_database
from agentrl.cli.invocation import Invocation
from agentrl.config import RunConfig
from agentrl.errors import UnavailableError
from agentrl.store.connection import Database
from agentrl.store.fleet import Fleet
from agentrl.store.indexes import DISPATCH, RECORD, TASK
from agentrl.store.scan import SCAN_TIMEOUT_S
from agentrl.store.sizes import measure

EVALUATION: Final = re.compile(r".+-eval-v\d+")
START_MODEL: Final = re.compile(r"laptop-[0-9a-f]{12}")
IN_USE_FOR: Final = timedelta(minutes=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """A database that may go. `num_bytes` as BSON."""

    name: str
    purpose: str
    num_bytes: int


async def prune(invocation: Invocation, console: Console) -> None:
    """List the leftovers; remove them with --yes."""
    config = invocation.config
    if config.store.db_connection_string is None and not database_dir(config).is_dir():
        raise UnavailableError(
            f"there is no database in {config.run.data_dir}: set --db_connection_string or --data_dir"
        )
    async with open_run_database(config, may_create=True) as server:
        found = [leftover async for leftover in find_leftovers(config, server)]
        for leftover in found:
            console.print(f"{leftover.name}  {leftover.purpose}, {decimal(leftover.num_bytes)}", markup=False)
        if not invocation.arguments.yes:
            console.print(f"{len(found)} databases; nothing was removed, --yes removes them")
            return
        for leftover in found:
            await drop_database(config, leftover.name)
    console.print(f"removed {len(found)} databases")


async def find_leftovers(config: RunConfig, server: Database) -> AsyncIterator[Leftover]:
    """The databases that may go, by name. Changes nothing."""
    for name in await server.list_databases():
        purpose = _purpose(config, name)
        if purpose is None:
            continue
        database = Database(connection_string(config), name=name, timeout_s=SCAN_TIMEOUT_S)
        try:
            if not await _is_a_run(database) and not await _is_in_use(database):
                yield Leftover(name=name, purpose=purpose, num_bytes=(await measure(database)).num_bytes)
        finally:
            await database.close()


async def drop_database(config: RunConfig, name: str) -> None:
    """Remove a database that is known to be a leftover."""
    database = Database(connection_string(config), name=name, timeout_s=SCAN_TIMEOUT_S)
    try:
        await database.drop()
    finally:
        await database.close()


def _purpose(config: RunConfig, name: str) -> str | None:
    if EVALUATION.fullmatch(name):
        return "an evaluation that was broken off"
    if START_MODEL.fullmatch(name) and (config.run.data_dir / "models" / name).is_dir():
        return "how a start model was trained"
    return None


async def _is_a_run(database: Database) -> bool:
    for name in (TASK, RECORD, DISPATCH):
        if await database.run(f"look into {name}", partial(database.durable(name).find_one, {})) is not None:
            return True
    return False


async def _is_in_use(database: Database) -> bool:
    fleet = Fleet(database)
    since = await database.server_time() - IN_USE_FOR
    heartbeats = [service.heartbeat_at for service in await fleet.list_services()]
    heartbeats += [worker.heartbeat_at for worker in await fleet.list_workers()]
    return any(heartbeat is not None and heartbeat > since for heartbeat in heartbeats)
