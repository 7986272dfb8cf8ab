"""A database server on loopback for laptops and tests: a `mongod` from the PATH, else SecantusDB's `secantusd-py`.

SecantusDB (extra `embedded`, GPL-2.0, beta) is only ever spoken to over the wire, as a separate process, and never
imported. It is not for production; MongoDB 6 or later is.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from pymongo import MongoClient
from pymongo.errors import PyMongoError

from agentrl.errors import UnavailableError
from agentrl.store.connection import embedded_uri

__all__ = [
    "EmbeddedServer",
    "answering_process",
    "embedded_command",
    "embedded_uri",
    "start_embedded",
    "wake_listener",
]

_HOST: Final = "127.0.0.1"
_READY_TIMEOUT_S: Final = 60.0
_TERM_TIMEOUT_S: Final = 20.0
_KILL_TIMEOUT_S: Final = 5.0
_EXIT_POLL_S: Final = 0.05
_WAKE_TIMEOUT_S: Final = 0.2
_OPLOG_ENTRIES: Final = 5000  # the default of 100 000 keeps gigabytes of full documents
_LOG_TAIL_BYTES: Final = 2000


def embedded_command(data_dir: Path, *, port: int) -> list[str]:
    """The command line of a server with its data under `data_dir`, for callers that supervise the process themselves.

    Raises UnavailableError if neither server is installed.
    """
    mongod = shutil.which("mongod")
    if mongod is not None:
        return [mongod, "--dbpath", str(data_dir), "--bind_ip", _HOST, "--port", str(port)]
    beside_python = Path(sys.executable).parent / "secantusd-py"
    secantusd = str(beside_python) if beside_python.exists() else shutil.which("secantusd-py")
    if secantusd is None:
        raise UnavailableError(
            "no database server found: neither `mongod` nor `secantusd-py` is on the PATH; "
            "`pip install agentrl[embedded]`, install MongoDB, or set db_connection_string"
        )
    arguments = ["--host", _HOST, "--port", str(port), "--storage-path", str(data_dir)]
    return [secantusd, *arguments, "--oplog-max-entries", str(_OPLOG_ENTRIES), "--log-level", "WARNING"]


class EmbeddedServer:
    """A running server, in its own process group. Stop it with `stop()`."""

    def __init__(self, process: subprocess.Popen[bytes], *, port: int) -> None:
        self._process = process
        self._port = port
        self.uri = embedded_uri(port)
        self.pid = process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process lives."""
        return self._process.poll() is None

    def stop(self) -> None:
        """Flush and end: SIGTERM, after 20 s SIGKILL, to the whole group. Safe to repeat."""
        if self._process.poll() is not None:
            return
        os.killpg(self.pid, signal.SIGTERM)
        deadline = time.monotonic() + _TERM_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                self._process.wait(timeout=_EXIT_POLL_S)
            except subprocess.TimeoutExpired:
                wake_listener(self._port)
            else:
                return
        self.kill()

    def kill(self) -> None:
        """End at once, as a crash would. Acknowledged durable writes survive."""
        if self._process.poll() is not None:
            return
        os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_KILL_TIMEOUT_S)


def wake_listener(port: int) -> None:
    """Let a stopping SecantusDB see that it stops: only a connection wakes its accepting thread, else it waits 2 s."""
    with contextlib.suppress(OSError), socket.create_connection((_HOST, port), timeout=_WAKE_TIMEOUT_S):
        pass


def start_embedded(data_dir: Path, *, port: int, log_path: Path) -> EmbeddedServer:
    """Start a server and wait until it answers, at most 60 s. Data of an earlier run is taken up again.

    Raises UnavailableError, with no process left behind, if the port is taken or the server does not come up.
    """
    _require_free_port(port)
    data_dir.mkdir(parents=True, exist_ok=True)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    command = embedded_command(data_dir, port=port)
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    server = EmbeddedServer(process, port=port)
    try:
        _wait_until_ready(server, log_path=log_path)
    except BaseException:
        server.kill()
        raise
    return server


def _require_free_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError as error:
            raise UnavailableError(
                f"db_port = {port}: {error.strerror}; if a database of this run is already there, set "
                f"db_connection_string = {embedded_uri(port)}, else choose another db_port"
            ) from error


def answering_process(uri: str) -> int | None:
    """Id of the server process that answers there; None if none does within half a second.

    Two servers that start on one port in the same instant both see it free. One of them ends, and what then answers is
    the other one, with somebody else's data.
    """
    with MongoClient[dict[str, int]](uri, serverSelectionTimeoutMS=500) as client:
        try:
            return int(client.admin.command("serverStatus")["pid"])
        except PyMongoError:
            return None


def _wait_until_ready(server: EmbeddedServer, *, log_path: Path) -> None:
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while time.monotonic() < deadline:
        answering = answering_process(server.uri)
        if answering == server.pid:
            return
        if not server.is_running:
            raise UnavailableError(f"the database server ended at start: {_log_tail(log_path)}")
        if answering is not None:
            time.sleep(_EXIT_POLL_S)  # another server has the port: ours is about to end
    raise UnavailableError(f"the database server did not answer within {_READY_TIMEOUT_S:g} s: {_log_tail(log_path)}")


def _log_tail(log_path: Path) -> str:
    tail = log_path.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
    return f"{log_path} ends with\n{tail}" if tail else f"{log_path} is empty"
