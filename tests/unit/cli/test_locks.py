import os
import subprocess
import sys
import textwrap

import pytest

from agentrl.cli.locks import hold_lock, try_lock
from agentrl.errors import UnavailableError

HOLD = textwrap.dedent("""
    import subprocess, sys
    from pathlib import Path
    from agentrl.cli.locks import try_lock
    descriptor = try_lock(Path(sys.argv[1]))
    if sys.argv[2:]:  # hand it on, as the launcher does to its guard
        guard = subprocess.Popen([sys.executable, "-c", "input()"], stdin=sys.stdin, pass_fds=(descriptor,))
        print(guard.pid, flush=True)
    else:
        print("held", flush=True)
        input()
""")


def start_holder(path, *extra: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", HOLD, str(path), *extra]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_held_lock_is_refused_with_the_process_that_holds_it(tmp_path):
    path = tmp_path / "folder" / "lock"
    with start_holder(path) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert try_lock(path) is None
        with (
            pytest.raises(UnavailableError, match=rf"run demo is in use by process {holder.pid}: .*kill {holder.pid}"),
            hold_lock(path, what="run demo", wait_s=5),
        ):
            pass
        holder.kill()


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    path = tmp_path / "lock"
    with start_holder(path) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        holder.kill()
        holder.wait(timeout=10)
    with hold_lock(path, what="run demo", wait_s=0):
        assert path.read_text() == str(os.getpid())


def test_a_guard_that_inherited_the_lock_is_waited_for(tmp_path):
    path = tmp_path / "lock"
    with start_holder(path, "guard") as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        int(holder.stdout.readline())
        holder.wait(timeout=10)  # the launcher is gone, its guard still stops children
        with (
            pytest.raises(UnavailableError, match="what an earlier launch started did not end within 0 s"),
            hold_lock(path, what="run demo", wait_s=0.3),
        ):
            pass
        holder.stdin.close()  # now the guard ends, too
        with hold_lock(path, what="run demo", wait_s=10) as descriptor:
            assert descriptor >= 0


def test_leaving_the_body_frees_the_lock(tmp_path):
    path = tmp_path / "lock"
    for _ in range(2):
        with hold_lock(path, what="run demo", wait_s=0):
            assert try_lock(path) is None
