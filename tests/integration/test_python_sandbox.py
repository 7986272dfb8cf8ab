"""The sandbox against scripts that try to get out of it, in real processes."""

import asyncio
import os
import time

import psutil
import pytest

from agentrl.tools.servers.landlock import landlock_version
from agentrl.tools.servers.python import isolation, python_tool
from agentrl.tools.servers.sandbox import SandboxLimits, run_script
from agentrl.tools.servers.seccomp import has_filter
from agentrl.tools.servers.serving import OperationError

LIMITS = SandboxLimits(wall_s=10, cpu_s=1, folder_files=50, folder_mib=8, output_bytes=100_000, output_chars=1000)
needs_filter = pytest.mark.skipif(not has_filter(), reason="no system call filter for this machine")
needs_landlock = pytest.mark.skipif(landlock_version() == 0, reason="this kernel has no Landlock")


async def run(code, *, limits=LIMITS):
    return await run_script(code, limits=limits)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    assert not list(tmp_path.iterdir())


async def test_both_outputs_come_back_and_a_warning_is_no_error():
    outcome = await run("import sys, warnings; print('result'); warnings.warn('careful')")
    assert outcome.is_ok
    assert outcome.stdout == "result\n"
    assert "careful" in outcome.stderr
    assert outcome.text().startswith("result\n[stderr]\n")


async def test_an_error_keeps_what_was_printed_and_shows_the_lines_of_the_script_alone():
    outcome = await run("print('before')\n1 / 0\n")
    assert (outcome.is_ok, outcome.exit_code, outcome.stdout) == (False, 1, "before\n")
    assert outcome.stderr.splitlines()[:3] == [
        "Traceback (most recent call last):", '  File "main.py", line 2, in <module>', "    1 / 0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "exit_code"), [("import sys; sys.exit(3)", 3), ("def", 1), ("raise SystemExit('bye')", 1), ("exit()", 0)]
)
async def test_exit_codes_are_those_of_python(code, exit_code):
    assert (await run(code)).exit_code == exit_code


async def test_scripts_start_in_an_empty_folder_that_is_removed_and_keep_nothing():
    code = "import os; print(os.getcwd()); print(os.listdir()); open('kept', 'w').write('x')"
    first, second = await run(code), await run(code)
    folders = [outcome.stdout.splitlines()[0] for outcome in (first, second)]
    assert [outcome.stdout.splitlines()[1] for outcome in (first, second)] == ["['main.py']"] * 2
    assert not any(os.path.exists(folder) for folder in folders)  # noqa: ASYNC240, PTH110  one look


async def test_nothing_of_the_environment_reaches_a_script(monkeypatch):
    monkeypatch.setenv("SERPER_API_KEY", "very-secret")
    assert "very-secret" not in (await run("import os; print(dict(os.environ))")).text()


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("while True: pass", "CPU time"),
        ("import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", "CPU time"),
        ("while True: print('x' * 1000)", "bytes of output"),
        ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "bytes of output"),
        ("import time\nfor n in range(10**6): open(f'{n}', 'w').close()", "files"),
        ("import os, time\nfor n in range(10**6): os.mkdir(f'{n}')", "files"),
        ("import os, time\nfor n in range(9999): os.mkdir('d'); os.chdir('d')\ntime.sleep(9)", "levels deep"),
        (
            "import os, time\nfor n in range(18): os.mkdir('d' * 250); os.chdir('d' * 250)\n"
            "for n in range(99): open(f'{n}', 'w').close()\ntime.sleep(9)",
            "cannot be looked into",
        ),
        (
            "import threading, time\nthreading.stack_size(2**15)\n"
            "for n in range(99): threading.Thread(target=time.sleep, args=(9,)).start()",
            "64 threads",
        ),
        ("import time\nfor n in range(99):\n  open(f'{n}', 'wb').write(b'x' * 2**20)\n  time.sleep(0.02)", "8 MiB"),
    ],
)
async def test_a_script_without_end_is_stopped_for_a_named_reason(code, reason):
    began = time.monotonic()
    outcome = await run(code)
    assert reason in outcome.stopped_by
    assert len(outcome.text()) < 4000
    assert time.monotonic() - began < 8


@pytest.mark.parametrize(
    "code",
    [
        "import time; time.sleep(60)",
        "import os; os.close(1); os.close(2); import time; time.sleep(60)",
        "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
        "import signal, time\nfor n in (1, 2, 13, 15): signal.signal(n, signal.SIG_IGN)\ntime.sleep(60)",
        "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()",
    ],
)
async def test_a_script_that_waits_is_stopped_in_time(code):
    outcome = await run(code, limits=SandboxLimits(wall_s=0.7))
    assert outcome.stopped_by == "it took longer than 0.7 s"


@pytest.mark.parametrize(
    "code", ["x = ' ' * 10**11", "x = [0]\nwhile True: x *= 2", "import mmap; mmap.mmap(-1, 10**11)"]
)
async def test_memory_beyond_the_limit_is_an_error_of_the_script(code):
    outcome = await run(code)
    assert outcome.exit_code == 1
    assert "emory" in outcome.stderr


@needs_filter
@pytest.mark.parametrize(
    "code",
    [
        "import os; os.fork()",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.execv('/bin/true', ['true'])",
        "import os; os.kill(os.getppid(), 9)",
        "import os; os.kill(0, 9)",
        "import os; os.kill(-1, 9)",
        "import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (0, 0))",
        "import socket; socket.create_connection(('127.0.0.1', 9))",
        "import socket; socket.socket(socket.AF_UNIX)",
        "import os; os.chmod('/tmp', 0o777)",
        "import os; os.utime('/tmp')",
        "import os; os.memfd_create('x')",
        "import os; os.mknod('x', 0o20666, os.makedev(1, 3))",
        "import os; os.nice(-5)",
        "import fcntl, os; fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid())",
        "import fcntl, os; fcntl.ioctl(os.pipe()[0], 0x8901, b'1234')",
    ],
)
async def test_processes_signals_and_sockets_are_out_of_reach(code):
    outcome = await run(code)
    assert outcome.exit_code == 1
    assert "PermissionError" in outcome.stderr


@needs_filter
async def test_system_calls_made_past_python_are_denied_as_well():
    code = (
        "import ctypes\nc = ctypes.CDLL(None, use_errno=True)\n"
        "def call(*a): r = c.syscall(*map(ctypes.c_long, a)); return ctypes.get_errno() if r < 0 else 0\n"
        "print(call(57), call(435, 0, 0), call(41, 2, 1, 0), call(101, 0, 0, 0, 0), call(425, 8, 0))\n"
        "print(call(272, 0x20000))\n"
        "print(call(30, 1, 0, 0), call(66, 1, 0, 0), call(69, 1, 0, 0, 0), call(241, 0))  # what others share\n"
        "print(call(157, 1, 0))  # to outlive the server\n"
        "print(call(463), call(999))  # newer than the filter\n"
    )
    assert (await run(code)).stdout == "1 38 1 1 1\n1\n1 1 1 1\n1\n38 38\n"


@needs_landlock
@pytest.mark.parametrize(
    "code",
    [
        "open('/tmp/agentrl-escape', 'w')",
        "open('../escape', 'w')",
        "open('/proc/self/environ').read()",
        "open('/etc/passwd').read()",
        "import os; os.listdir('/proc')",
        "import os; os.listdir('/')",
        "import os, sys; open(os.path.join(os.path.dirname(sys.executable), 'x'), 'w')",
        "import os; os.symlink('/etc/passwd', 'link'); open('link').read()",
        "import os; os.link('/etc/hostname', 'link'); open('link').read()",
        "import os; os.rename('main.py', '/tmp/agentrl-escape')",
        "import os; os.open('/proc/self/mem', os.O_RDWR)",
    ],
)
async def test_files_outside_the_folder_are_out_of_reach(code):
    outcome = await run(code)
    assert outcome.exit_code == 1
    assert not os.path.exists("/tmp/agentrl-escape")  # noqa: ASYNC240, PTH110  one look


async def test_the_files_of_a_script_work_inside_its_folder():
    code = (
        "import os, tempfile, sqlite3\nos.mkdir('d'); open('d/a', 'w').write('x')\n"
        "os.rename('d/a', 'b'); os.remove('b')\n"
        "os.truncate('main.py', 0)\nwith tempfile.NamedTemporaryFile() as f: f.write(b'1')\n"
        "db = sqlite3.connect('x.db'); db.execute('create table t (a)'); db.commit(); print('done')"
    )
    assert (await run(code)).text() == "done"


async def test_threads_and_the_usual_libraries_work():
    code = (
        "import threading, decimal, fractions, zoneinfo, json, random, hashlib, concurrent.futures as f\nimport numpy\n"
        "with f.ThreadPoolExecutor(4) as pool: print(sum(pool.map(abs, range(-9, 1))))\n"
        "print(numpy.linalg.det(numpy.eye(3)), zoneinfo.ZoneInfo('UTC'))"
    )
    assert (await run(code, limits=SandboxLimits())).stdout == "45\n1.0 UTC\n"


async def test_a_script_that_is_cancelled_is_gone_at_once():
    others = set(psutil.Process().children())
    running = asyncio.create_task(run("import time; print('up', flush=True); time.sleep(60)"))
    while not set(psutil.Process().children()) - others:
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not set(psutil.Process().children()) - others


async def test_isolation_is_found_by_trying_and_complete_on_a_current_kernel():
    found = await isolation()
    assert found["processes"] is has_filter()
    assert found["files"] is (landlock_version() > 0)
    assert found["network"] or not has_filter()


async def test_the_tool_gives_the_model_both_outputs_of_a_script_that_failed():
    tool = python_tool(LIMITS, max_running=1)
    assert await tool.run({"code": "print(6 * 7)"}) == "42"
    assert await tool.run({"code": "pass"}) == "[no output: print what you want to see]"
    with pytest.raises(OperationError, match=r"(?s)^exit code 1\n\[stdout\]\na\n\[stderr\]\nTraceback.*ValueError: b$"):
        await tool.run({"code": "print('a'); raise ValueError('b')"})


@pytest.mark.parametrize(
    "code", ["print('\\ud800')", "\x00", "# -*- coding: latin-1 -*-\nprint('é')", "print(input())", ""]
)
async def test_odd_scripts_end_normally(code):
    assert (await run(code)).stopped_by is None


async def test_more_scripts_than_slots_take_turns():
    tool = python_tool(LIMITS, max_running=2)
    results = await asyncio.gather(*(tool.run({"code": f"print({n})"}) for n in range(8)))
    assert results == [str(n) for n in range(8)]
