"""The embedded server starts, says why it does not, and leaves nothing behind."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from agentrl.errors import UnavailableError
from agentrl.store import open_store
from agentrl.store.embedded import answering_process, embedded_command, embedded_uri, start_embedded, wake_listener


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_server_keeps_its_data_over_a_restart_and_ends_when_stopped(tmp_path: Path, free_port: int) -> None:
    log_path = tmp_path / "server.log"
    for expected in (None, {"state": "kept"}):
        server = start_embedded(tmp_path / "data", port=free_port, log_path=log_path)
        assert server.uri == embedded_uri(free_port)
        assert server.is_running
        store = open_store(server.uri, database="d")
        assert await store.get_run() == expected
        await store.put_run({"state": "kept"})
        await store.close()
        server.stop()
        server.stop()
        assert not is_alive(server.pid)


def test_a_taken_port_is_named_with_the_way_out(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(UnavailableError, match=f"db_port = {port}.*db_connection_string"):
            start_embedded(tmp_path / "data", port=port, log_path=tmp_path / "server.log")
    assert not (tmp_path / "data").exists(), "nothing was started"


def test_another_server_that_took_the_port_in_the_same_instant_is_not_mistaken_for_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free_port: int
) -> None:
    other = start_embedded(tmp_path / "other", port=free_port, log_path=tmp_path / "other.log")
    try:
        assert answering_process(other.uri) == other.pid
        monkeypatch.setattr("agentrl.store.embedded._require_free_port", lambda port: None)
        with pytest.raises(UnavailableError, match=r"ended at start: .*server\.log"):
            start_embedded(tmp_path / "data", port=free_port, log_path=tmp_path / "server.log")
    finally:
        other.stop()
    assert answering_process(other.uri) is None


def test_a_server_that_dies_at_start_shows_its_log(tmp_path: Path, free_port: int) -> None:
    (tmp_path / "data").mkdir()
    for name in ("WiredTiger", "WiredTiger.wt", "WiredTiger.turtle"):
        (tmp_path / "data" / name).write_text("not a database", encoding="utf-8")
    with pytest.raises(UnavailableError, match=r"ended at start: .*server\.log"):
        start_embedded(tmp_path / "data", port=free_port, log_path=tmp_path / "server.log")


def test_without_any_server_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    with pytest.raises(UnavailableError, match="embedded"):
        embedded_command(tmp_path / "data", port=1)


def test_a_mongod_on_the_path_is_preferred(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mongod = tmp_path / "mongod"
    mongod.write_text("#!/bin/sh\n", encoding="utf-8")
    mongod.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    command = embedded_command(tmp_path / "data", port=4242)
    assert command[0] == str(mongod)
    assert "4242" in command


def test_waking_a_listener_makes_one_connection_and_a_port_without_one_is_no_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        wake_listener(port)
        listener.settimeout(5)
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.recv(1) == b"", "closed at once"
    wake_listener(port)
