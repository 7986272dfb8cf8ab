"""Signs of life: what makes a child count as hung, and what does not."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.cli.launch.life import LONGEST_GAP_S, START_LIMIT_S, LifeWatch, stopped_groups

LIMIT_S = 10.0


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    code = "import signal; print('up', flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", code], process_group=0, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def watch(pulse_file: Path | None = None) -> LifeWatch:
    return LifeWatch(pulse_file=pulse_file, limit_s=LIMIT_S, looked_at=0.0)


def look(life: LifeWatch, now: float, child: subprocess.Popen[bytes]) -> str | None:
    return life.look(now, is_stopped=child.pid in stopped_groups([child.pid]))


def beat(pulse_file: Path, *, at: float) -> None:
    pulse_file.touch()
    os.utime(pulse_file, (at, at))


def test_a_child_whose_pulse_stands_still_counts_as_hung_after_the_limit(child, tmp_path):
    pulse_file = tmp_path / "pulse"
    life = watch(pulse_file)
    for second in range(1, 20):
        beat(pulse_file, at=second)
        assert look(life, second, child) is None
    for second in range(20, 30):
        assert look(life, second, child) is None
    assert look(life, 30, child) == "showed no sign of life for 11 s"


def test_a_clock_that_jumps_does_not_matter(child, tmp_path):
    pulse_file = tmp_path / "pulse"
    life = watch(pulse_file)
    for second, wall in enumerate([1e9, 5.0, 2e9] * 10, start=1):
        beat(pulse_file, at=wall)
        assert look(life, second, child) is None


def test_time_in_which_the_launcher_did_not_look_counts_little(child, tmp_path):
    pulse_file = tmp_path / "pulse"
    beat(pulse_file, at=1.0)
    life = watch(pulse_file)
    look(life, 1.0, child)
    for hours in range(1, int(LIMIT_S / LONGEST_GAP_S) + 1):
        assert look(life, 3600.0 * hours, child) is None


def test_a_child_that_has_not_begun_to_show_a_pulse_has_longer(child, tmp_path):
    life = watch(tmp_path / "pulse")
    looks = [life.look(second, is_stopped=False) for second in range(1, int(START_LIMIT_S) + 2)]
    assert looks[:-1] == [None] * int(START_LIMIT_S)
    assert looks[-1] == f"showed no sign of life for {START_LIMIT_S + 1:.0f} s"


def test_a_stopped_child_counts_as_hung_also_without_a_pulse_and_a_continued_one_does_not(child):
    life = watch()
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    assert [look(life, second, child) for second in range(1, 11)] == [None] * 10
    os.kill(child.pid, signal.SIGCONT)
    os.waitid(os.P_PID, child.pid, os.WCONTINUED)
    assert look(life, 11, child) is None
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    assert [look(life, second, child) for second in range(12, 22)] == [None] * 10
    assert look(life, 22, child) == "was stopped for 11 s"
