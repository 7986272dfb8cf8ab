import signal
import subprocess
import sys
import time

import pytest

from agentrl.cli.launch.groups import end_groups, running_members
from agentrl.cli.launch.guard import NUM_STAGES, longest_end_s, watch
from agentrl.cli.launch.processes import DATABASE_STOPS, ENGINE_STOPS, SAMPLERS_STOP
from agentrl.cli.launch.supervisor import LOCK_WAIT_S, STOP_GRACE_S

DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"


def start_group(code: str = "import signal; print('up', flush=True); signal.pause()") -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, process_group=0)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


@pytest.fixture
def groups():
    started = [start_group() for _ in range(3)]
    yield [process.pid for process in started]
    for process in started:
        process.kill()
        process.wait(timeout=10)
        assert process.stdout is not None
        process.stdout.close()


def test_the_end_of_the_lines_ends_what_is_still_registered(groups):
    first, second, third = groups
    lines = [f"+{first} 0\n", f"+{second} 1\n", f"+{third} 0\n", f"-{third}\n"]
    watch(lines, grace_s=5)
    assert running_members([first, second]) == []
    assert running_members([third]) == [third]


def test_lower_stages_end_first(groups, monkeypatch):
    order: list[list[int]] = []
    monkeypatch.setattr("agentrl.cli.launch.guard.end_groups", lambda ids, *, grace_s: order.append(list(ids)))
    watch([f"+{groups[0]} 2", f"+{groups[1]} 0", f"+{groups[2]} 2"], grace_s=1)
    assert order == [[groups[1]], [groups[0], groups[2]]]


def test_ending_a_group_that_is_gone_is_fine(groups):
    end_groups(groups[:1], grace_s=5)
    end_groups(groups[:1], grace_s=5)
    assert running_members(groups[:1]) == []


def test_what_helps_a_group_to_end_is_done_until_it_has_ended():
    child = start_group(DEAF)
    calls: list[bool] = []
    end_groups([child.pid], grace_s=0.2, while_waiting=lambda: calls.append(True))
    assert calls
    calls.clear()
    end_groups([child.pid], grace_s=0.2, while_waiting=lambda: calls.append(True))
    assert not calls
    child.wait(timeout=10)
    assert child.stdout is not None
    child.stdout.close()


def test_a_launch_waits_longer_for_its_predecessors_guard_than_that_can_take(tmp_path):
    grace_s = 0.5
    children = [start_group(DEAF) for _ in range(NUM_STAGES)]
    began = time.monotonic()
    watch([f"+{child.pid} {stage}" for stage, child in enumerate(children)], grace_s=grace_s)
    took_s = time.monotonic() - began
    for child in children:
        with child:
            assert child.wait(timeout=5) == -signal.SIGKILL
    assert NUM_STAGES * grace_s <= took_s < longest_end_s(grace_s)
    assert longest_end_s(STOP_GRACE_S) == LOCK_WAIT_S
    assert {SAMPLERS_STOP, ENGINE_STOPS, DATABASE_STOPS} == set(range(NUM_STAGES))
