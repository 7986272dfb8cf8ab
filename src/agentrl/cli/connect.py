"""Finding the database of a run, and starting the embedded one for as long as a command needs it.

data/database/        files of the embedded server
data/database.lock    held while a server runs on them
data/database.port    where it listens
"""

from __future__ import annotations

import asyncio
import difflib
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager, nullcontext
from pathlib import Path

from agentrl.cli.launch.supervisor import Guard
from agentrl.cli.locks import try_lock
from agentrl.config import RunConfig
from agentrl.errors import UnavailableError
from agentrl.store import MongoStore, open_store
from agentrl.store.connection import Database
from agentrl.store.embedded import EmbeddedServer, embedded_uri, start_embedded
from agentrl.store.scan import SCAN_TIMEOUT_S


def database_dir(config: RunConfig) -> Path:
    """Files of the embedded server."""
    return config.run.data_dir / "database"


def database_lock(config: RunConfig) -> Path:
    """Lock file of the embedded server."""
    return config.run.data_dir / "database.lock"


def connection_string(config: RunConfig) -> str:
    """The URI of the run's database: the one given, else of the embedded server."""
    if config.store.db_connection_string is not None:
        return config.store.db_connection_string
    return embedded_uri(database_port(config))


def database_port(config: RunConfig) -> int:
    """Where the embedded server listens, or will if it was never started."""
    path = _port_file(config)
    return int(path.read_text(encoding="ascii")) if path.is_file() else config.store.db_port


@contextmanager
def reserved_port(config: RunConfig) -> Iterator[int]:
    """The port for an embedded server, remembered for other commands: `db_port`, or a free one if that is taken.

    Other databases of this machine keep off it for the length of the body, also before the server listens and while
    it is started again. A port the user asked for is not replaced: raises UnavailableError if it is taken.
    """
    port = config.store.db_port
    lock = _reserve(port)
    if lock is None and "db_port" in config.store.model_fields_set:
        raise UnavailableError(
            f"db_port = {port}: another program listens there; choose another port, or leave it out for a free one"
        )
    while lock is None:
        port = _free_port()
        lock = _reserve(port)
    try:
        path = _port_file(config)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(port), encoding="ascii")
        yield port
    finally:
        os.close(lock)


async def prepared_store(
    config: RunConfig, *, must_exist: bool = False, outlasts_until: asyncio.Event | None = None
) -> MongoStore:
    """The run's store, connected. Raises UnavailableError if no database answers, or none is there that must exist.

    Later on, a database that is away ends operations with a StoreError; with `outlasts_until` they wait for it until
    that event is set.
    """
    store = open_store(connection_string(config), database=config.run.run_name, timeout_s=config.store.db_timeout_s)
    try:
        if must_exist:
            _check_run_exists(config, runs=await store.list_runs())
        await store.prepare()
    except BaseException:
        await store.close()
        raise
    if outlasts_until is not None:
        store.outlast_outages(outlasts_until)
    return store


def _check_run_exists(config: RunConfig, *, runs: Sequence[str]) -> None:
    name = config.run.run_name
    if name in runs:
        return
    near = difflib.get_close_matches(name, runs, n=1)
    known = f"did you mean {near[0]}?" if near else f"there are: {', '.join(runs)}" if runs else "there is none yet"
    where = config.run.data_dir if config.store.db_connection_string is None else "this database"
    raise UnavailableError(f"there is no run {name} in {where}; {known}")


@asynccontextmanager
async def open_run_store(
    config: RunConfig,
    *,
    may_start: bool = False,
    may_create: bool = False,
    must_exist: bool = False,
    outlasts_until: asyncio.Event | None = None,
) -> AsyncIterator[MongoStore]:
    """The run's store for the length of the body.

    With `may_start` an idle embedded database is started for it, with `may_create` also an empty new one. With
    `must_exist` a run that is not there is an UnavailableError, and is not created by looking. `outlasts_until`: see
    `prepared_store`.
    """
    with open_database_server(config, may_start=may_start, may_create=may_create):
        store = await prepared_store(config, must_exist=must_exist, outlasts_until=outlasts_until)
        try:
            yield store
        finally:
            await store.close()


@contextmanager
def open_database_server(config: RunConfig, *, may_start: bool, may_create: bool) -> Iterator[None]:
    """The embedded database for the length of the body, if one is needed; see `open_run_store`."""
    needs_server = (may_start or may_create) and config.store.db_connection_string is None
    if may_create:
        database_dir(config).mkdir(parents=True, exist_ok=True)
    with _embedded_while_needed(config) if needs_server else nullcontext():
        yield


@asynccontextmanager
async def open_run_database(config: RunConfig, *, may_create: bool = False) -> AsyncIterator[Database]:
    """The run's database for maintenance, with time for whole collections. Creates nothing in it.

    Raises UnavailableError if no server answers, or without `may_create` if the run is not there.
    """
    if may_create and config.store.db_connection_string is None:
        database_dir(config).mkdir(parents=True, exist_ok=True)
    with _embedded_while_needed(config) if config.store.db_connection_string is None else nullcontext():
        uri, name = connection_string(config), config.run.run_name
        probe = Database(uri, name=name, timeout_s=config.store.db_timeout_s)
        try:
            await probe.connect()
            if not may_create:
                _check_run_exists(config, runs=await probe.list_databases())
        finally:
            await probe.close()
        database = Database(uri, name=name, timeout_s=SCAN_TIMEOUT_S)
        try:
            yield database
        finally:
            await database.close()


@contextmanager
def _embedded_while_needed(config: RunConfig) -> Iterator[None]:
    """Run the embedded server unless another process of this data folder runs it already."""
    lock = try_lock(database_lock(config))
    if lock is None:
        yield
        return
    try:
        if not database_dir(config).is_dir():
            raise UnavailableError(
                f"there is no database in {config.run.data_dir}: start a run with `agentrl launch RUN_NAME`, "
                "or set --db_connection_string or --data_dir"
            )
        sys.stderr.write("starting the embedded database for this command\n")
        log_path = config.run.log_dir / "database.log"
        with guarded_server(config, log_path=log_path, lock_descriptor=lock):
            yield
    finally:
        os.close(lock)


@contextmanager
def guarded_server(config: RunConfig, *, log_path: Path, lock_descriptor: int) -> Iterator[EmbeddedServer]:
    """An embedded server that also ends when this process is killed without a word."""
    with reserved_port(config) as port, closing(Guard(lock_descriptors=[lock_descriptor])) as guard:
        server = start_embedded(database_dir(config), port=port, log_path=log_path)
        guard.track(server.pid, stage=0)
        try:
            yield server
        finally:
            server.stop()
            guard.forget(server.pid)


def _port_file(config: RunConfig) -> Path:
    return config.run.data_dir / "database.port"


def _reserve(port: int) -> int | None:
    """The descriptor that reserves a free port until it is closed; None for a port that is taken or reserved."""
    try:
        lock = try_lock(Path(tempfile.gettempdir()) / f"agentrl-port-{port}.lock")
    except PermissionError:  # another user's
        return None
    if lock is not None and not _is_free(port):
        os.close(lock)
        return None
    return lock


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
