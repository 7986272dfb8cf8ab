"""`--fresh`: start a run over. What is there is never wiped: with `--force` it is kept under a name of its own.

    database RUN          copied to RUN-<UTC time>, read back and compared, and only then removed
    OUTPUT_DIR/RUN/*      moved to OUTPUT_DIR/RUN-<UTC time>/

Nothing is moved before the copy is proven, and the database is removed last: whatever interrupts this, both the old
database and the old files are there under one of the two names.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import psutil
from rich.console import Console

from agentrl.cli.connect import connection_string, database_dir, open_run_database
from agentrl.cli.launch.supervisor import LOCK_WAIT_S
from agentrl.cli.locks import hold_lock
from agentrl.cli.maintenance import shown_progress
from agentrl.config import RunConfig
from agentrl.errors import ConfigError, UnavailableError
from agentrl.store.connection import Database
from agentrl.store.fleet import Fleet
from agentrl.store.scan import SCAN_TIMEOUT_S, Progress, copy_database, is_empty
from agentrl.types import Worker

LOCK_NAME: Final = "launch.lock"
_LONGEST_NAME: Final = 63
_MISSED_HEARTBEATS: Final = 3


def add_fresh_arguments(parser: argparse.ArgumentParser) -> None:
    """The two flags."""
    parser.add_argument("--fresh", action="store_true", help="start over; refused if the run holds anything")
    parser.add_argument("--force", action="store_true", help="with --fresh: keep what is there as RUN_NAME-<UTC time>")


def check_fresh_arguments(arguments: argparse.Namespace) -> None:
    """Refuse --force alone and --fresh on one of several ranks. Raises ConfigError."""
    if arguments.force and not arguments.fresh:
        raise ConfigError("--force only says what --fresh does with an earlier run; give both")
    if arguments.fresh and os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError("--fresh cannot run on one of several ranks; use `agentrl launch RUN_NAME --fresh`")


async def start_over(config: RunConfig, *, force: bool, console: Console) -> None:
    """Make the run new.

    Raises ConfigError if it holds anything and `force` is off, UnavailableError if it is in use, StoreError if the copy
    of its database differs from it.
    """
    run = config.run
    with hold_lock(run.run_dir / LOCK_NAME, what=f"run {run.run_name}", wait_s=LOCK_WAIT_S):
        files = [path for path in sorted(run.run_dir.iterdir()) if path.name != LOCK_NAME]
        if config.store.db_connection_string is None and not database_dir(config).is_dir():
            _keep_without_database(config, files, force=force, console=console)
            return
        async with open_run_database(config, may_create=True) as database:
            has_documents = not await is_empty(database)
            if not has_documents and not files:
                return
            _check_forced(config, files, has_documents=has_documents, force=force)
            kept = kept_name(run.run_name, now=datetime.now(UTC))
            if has_documents:
                await _check_unused(config, database)
                with shown_progress(console, f"keeping the database as {kept}") as progress:
                    await _keep_database(config, database, kept=kept, progress=progress)
            _move(files, run.output_dir / kept)
            if has_documents:
                await database.drop()
    console.print(f"kept the earlier run as {kept}: {_what(files, has_documents=has_documents)}", soft_wrap=True)


def kept_name(run_name: str, *, now: datetime) -> str:
    """The name of what was there before; a run name itself, so that every command can still read it."""
    stamp = f"-{now:%Y%m%dT%H%M%SZ}"
    return f"{run_name[: _LONGEST_NAME - len(stamp)]}{stamp}"


def _keep_without_database(config: RunConfig, files: list[Path], *, force: bool, console: Console) -> None:
    if not files:
        return
    _check_forced(config, files, has_documents=False, force=force)
    kept = kept_name(config.run.run_name, now=datetime.now(UTC))
    _move(files, config.run.output_dir / kept)
    console.print(f"kept the earlier run as {kept}: {_what(files, has_documents=False)}", soft_wrap=True)


def _check_forced(config: RunConfig, files: list[Path], *, has_documents: bool, force: bool) -> None:
    if force:
        return
    name = config.run.run_name
    raise ConfigError(
        f"--fresh: run {name} holds {_what(files, has_documents=has_documents)}; add --force to keep that as "
        f"{name}-<UTC time> and start over, leave out --fresh to continue it, or choose another RUN_NAME"
    )


def _what(files: list[Path], *, has_documents: bool) -> str:
    things = ["a database"] if has_documents else []
    if files:
        things.append(f"{len(files)} files and folders in {files[0].parent}")
    return " and ".join(things)


async def _check_unused(config: RunConfig, database: Database) -> None:
    """Refuse while a process of the run lives: it would write into a copy half made."""
    recent = await database.server_time() - timedelta(seconds=_MISSED_HEARTBEATS * config.store.heartbeat_s)
    for worker in _living(await Fleet(database).list_workers(), since=recent):
        raise UnavailableError(
            f"run {config.run.run_name} is in use by {worker.kind} {worker.id} "
            f"(process {worker.pid} on {worker.host}): stop it first"
        )


def _living(workers: Iterable[Worker], *, since: datetime) -> Iterable[Worker]:
    for worker in workers:
        is_recent = worker.heartbeat_at is not None and worker.heartbeat_at > since and worker.phase != "stopped"
        if is_recent and (worker.host != socket.gethostname() or psutil.pid_exists(worker.pid)):
            yield worker


async def _keep_database(config: RunConfig, database: Database, *, kept: str, progress: Progress) -> None:
    target = Database(connection_string(config), name=kept, timeout_s=SCAN_TIMEOUT_S)
    try:
        if await target.exists():
            raise UnavailableError(f"there is a run {kept} already; try again in a second")
        try:
            await copy_database(database, target, progress=progress)
            await target.create_indexes()
        except BaseException:
            await target.drop()  # a part of a copy, and nothing else
            raise
    finally:
        await target.close()


def _move(files: list[Path], target: Path) -> None:
    if not files:
        return
    target.mkdir()
    for path in files:
        path.rename(target / path.name)
