"""Faults on real child processes."""

import asyncio
import errno
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from agentrl.cli.chaos.faults import fill_disk, hold

WITHIN_S = 20.0

WRITER = """
import sys
print("ready", flush=True)
for line in sys.stdin:
    try:
        with open(sys.argv[1], "wb") as file:
            file.write(bytes(100_000))
    except OSError as error:
        sys.exit(error.errno)
    print("written", flush=True)
"""


@contextmanager
def writer(path: Path) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-c", WRITER, str(path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        yield child
        assert child.stdin is not None
        child.stdin.close()


def order_write(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("go\n")
    child.stdin.flush()


async def test_a_full_disk_fails_the_victims_writes(tmp_path):
    with writer(tmp_path / "file") as child:
        full = asyncio.create_task(fill_disk(psutil.Process(child.pid)))
        await asyncio.sleep(0)
        order_write(child)
        async with asyncio.timeout(WITHIN_S):
            assert await full == "its writes failed and it ended"
        assert child.wait(timeout=WITHIN_S) == errno.EFBIG
    assert (tmp_path / "file").stat().st_size < 100_000


async def test_a_disk_is_no_longer_full_afterwards(tmp_path):
    with writer(tmp_path / "file") as child:
        full = asyncio.create_task(fill_disk(psutil.Process(child.pid)))
        await asyncio.sleep(0)
        full.cancel()
        with pytest.raises(asyncio.CancelledError):
            await full
        order_write(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "written\n"
    assert (tmp_path / "file").stat().st_size == 100_000


async def test_a_held_process_is_stopped_and_goes_on_even_when_the_holder_is_cancelled(tmp_path):
    with writer(tmp_path / "file") as child:
        process = psutil.Process(child.pid)
        holding = asyncio.create_task(hold([process], for_s=WITHIN_S))
        async with asyncio.timeout(WITHIN_S):
            while process.status() != psutil.STATUS_STOPPED:
                await asyncio.sleep(0.01)
        holding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await holding
        order_write(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "written\n"


async def test_a_process_that_ended_while_held_is_no_error(tmp_path):
    with writer(tmp_path / "file") as child:
        process = psutil.Process(child.pid)
        holding = asyncio.create_task(hold([process], for_s=0.2))
        await asyncio.sleep(0)
        child.kill()
        child.wait(timeout=WITHIN_S)
        async with asyncio.timeout(WITHIN_S):
            await holding
