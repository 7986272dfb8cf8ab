"""The supervisor with real processes: tiny ones that write a line and wait, die, or ignore SIGTERM."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from agentrl.cli.launch import supervisor as module
from agentrl.cli.launch.groups import running_members
from agentrl.cli.launch.supervisor import ChildFailedError, ChildSpec, Guard, Supervisor, child_environment
from agentrl.errors import UserError

DEADLINE_S = 20.0
WAITS = "import signal; print('up', flush=True); signal.pause()"


@pytest.fixture(scope="module", autouse=True)
def no_child_is_left_over() -> Iterator[None]:
    """Whatever these tests start, they also end; other modules' servers may be running."""
    before = living_children()
    yield
    assert living_children() - before == set()


def living_children() -> set[int]:
    return {child.pid for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE}


def make_spec(tmp_path: Path, code: str, *, name: str = "child", stage: int = 0, ends_run: bool = False) -> ChildSpec:
    return ChildSpec(
        name=name,
        argv=(sys.executable, "-c", code),
        environ=dict(os.environ),
        log_path=tmp_path / f"{name}.log",
        stop_stage=stage,
        ends_run=ends_run,
    )


async def until(condition, *, supervisor: Supervisor | None = None) -> None:
    deadline = time.monotonic() + DEADLINE_S
    ticker = asyncio.Event()
    while not condition():
        if supervisor is not None:
            supervisor.check()
        assert time.monotonic() < deadline, "the condition did not come true in time"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ticker.wait(), timeout=0.02)


def ups(tmp_path: Path, name: str = "child") -> int:
    log = tmp_path / f"{name}.log"
    return log.read_text().count("up") if log.exists() else 0


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_BACK_OFF_S", 0.01)
    monkeypatch.setattr(module, "STOP_GRACE_S", 1.0)
    monkeypatch.setattr(module, "LEFTOVER_GRACE_S", 0.2)


async def test_a_child_killed_with_signal_9_is_restarted_and_counted(tmp_path, fast):
    with closing(Guard(lock_descriptors=())) as guard:
        async with Supervisor(guard=guard) as supervisor:
            supervisor.start(make_spec(tmp_path, WAITS))
            await until(lambda: ups(tmp_path) == 1)
            (first,) = supervisor._running
            os.kill(first, signal.SIGKILL)
            await until(lambda: ups(tmp_path) == 2, supervisor=supervisor)
            assert supervisor.restarts == {"child": 1}
            assert first not in supervisor._running


async def test_leaving_the_supervisor_stops_every_child_and_grandchild(tmp_path, fast):
    code = f"""
        import subprocess, sys, signal
        subprocess.Popen([sys.executable, "-c", {WAITS!r}])
        subprocess.Popen([sys.executable, "-c", {WAITS!r}])
        signal.pause()
    """
    with closing(Guard(lock_descriptors=())) as guard:
        async with Supervisor(guard=guard) as supervisor:
            supervisor.start(make_spec(tmp_path, textwrap.dedent(code)))
            await until(lambda: ups(tmp_path) == 2)
            groups = list(supervisor._running)
            assert len(running_members(groups)) == 3
        assert running_members(groups) == []


async def test_a_child_that_ignores_sigterm_is_killed_after_the_grace(tmp_path, fast):
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
    with closing(Guard(lock_descriptors=())) as guard:
        async with Supervisor(guard=guard) as supervisor:
            supervisor.start(make_spec(tmp_path, stubborn))
            await until(lambda: ups(tmp_path) == 1)
            groups = list(supervisor._running)
        assert running_members(groups) == []


async def test_later_stages_stop_after_earlier_ones_are_down(tmp_path, fast):
    order = tmp_path / "order"
    code = """
        import signal, sys
        def leave(*_):
            with open({order!r}, "a") as f: f.write({name!r})
            sys.exit(0)
        signal.signal(signal.SIGTERM, leave)
        print("up", flush=True)
        while True: signal.pause()
    """
    with closing(Guard(lock_descriptors=())) as guard:
        async with Supervisor(guard=guard) as supervisor:
            for name, stage in (("c", 2), ("a", 0), ("b", 1)):
                source = textwrap.dedent(code).format(order=str(order), name=name)
                supervisor.start(make_spec(tmp_path, source, name=name, stage=stage))
            await until(lambda: all(ups(tmp_path, name) for name in "abc"))
    assert order.read_text() == "abc"


async def test_a_child_that_keeps_dying_without_progress_fails_with_the_end_of_its_log(tmp_path, fast):
    with closing(Guard(lock_descriptors=())) as guard:
        async with Supervisor(guard=guard) as supervisor:
            supervisor.start(make_spec(tmp_path, "print('up'); raise SystemExit('the disk is full')"))
            with pytest.raises(
                ChildFailedError, match=r"(?s)child ended 6 times in a row.*exit code 1.*the disk is full"
            ):
                await until(lambda: False, supervisor=supervisor)
    assert ups(tmp_path) == 6


async def test_progress_forgives_earlier_failures(tmp_path, fast):
    with closing(Guard(lock_descriptors=())) as guard:
        async with Supervisor(guard=guard) as supervisor:
            supervisor.start(make_spec(tmp_path, "print('up'); raise SystemExit(1)"))

            def progressed() -> bool:
                supervisor.note_progress()
                return ups(tmp_path) > 8

            await until(progressed, supervisor=supervisor)
            assert supervisor.restarts["child"] >= 8


async def test_a_user_error_in_the_first_life_is_not_retried(tmp_path, fast):
    with closing(Guard(lock_descriptors=())) as guard:
        async with Supervisor(guard=guard) as supervisor:
            code = "print('up', 'agentrl: --max_steps is wrong', 'bye', sep='\\n'); raise SystemExit(2)"
            supervisor.start(make_spec(tmp_path, code))
            with pytest.raises(UserError) as refused:
                await until(lambda: False, supervisor=supervisor)
            assert str(refused.value) == f"child: --max_steps is wrong ({tmp_path / 'child.log'})"
    assert ups(tmp_path) == 1


async def test_the_child_that_ends_the_run_is_not_restarted(tmp_path, fast):
    with closing(Guard(lock_descriptors=())) as guard:
        async with Supervisor(guard=guard) as supervisor:
            supervisor.start(make_spec(tmp_path, "print('up')", ends_run=True))
            await until(supervisor.check)
    assert ups(tmp_path) == 1


async def test_a_one_shot_child_reports_its_failure(tmp_path, fast):
    with closing(Guard(lock_descriptors=())) as guard:
        async with Supervisor(guard=guard) as supervisor:
            await supervisor.run_once(make_spec(tmp_path, "print('fine')"))
            with pytest.raises(ChildFailedError, match=r"(?s)exit code 3.*no model"):
                await supervisor.run_once(make_spec(tmp_path, "print('no model'); raise SystemExit(3)"))


def test_no_child_is_left_after_the_launcher_is_killed_with_signal_9(tmp_path):
    launcher = f"""
        import asyncio, os, sys
        from pathlib import Path
        from agentrl.cli.launch.supervisor import ChildSpec, Guard, Supervisor

        waits = "import signal; signal.pause()"
        code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {{waits!r}}]); " + {WAITS!r}

        async def main():
            guard = Guard(lock_descriptors=(), grace_s=2.0)
            async with Supervisor(guard=guard) as supervisor:
                for name in ("a", "b"):
                    supervisor.start(ChildSpec(name=name, argv=(sys.executable, "-c", code), environ=dict(os.environ),
                                               log_path=Path({str(tmp_path)!r}) / (name + ".log")))
                await asyncio.sleep(0)
                await asyncio.sleep(0.1)
                print(*supervisor._running, flush=True)
                await asyncio.Event().wait()

        asyncio.run(main())
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(launcher)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        groups = [int(group) for group in process.stdout.readline().split()]
        assert len(groups) == 2
        asyncio.run(until(lambda: ups(tmp_path, "a") == 1 and ups(tmp_path, "b") == 1))
        assert len(running_members(groups)) == 4
    finally:
        process.kill()
        process.wait(timeout=DEADLINE_S)
        process.stdout.close()
    asyncio.run(until(lambda: running_members(groups) == []))


async def test_a_guard_that_died_is_replaced_and_told_everything(tmp_path, fast):
    with closing(Guard(lock_descriptors=())) as guard:
        async with Supervisor(guard=guard) as supervisor:
            supervisor.start(make_spec(tmp_path, WAITS, name="a"))
            await until(lambda: ups(tmp_path, "a") == 1)
            first = guard._process
            assert first is not None
            first.kill()
            first.wait(timeout=DEADLINE_S)
            supervisor.start(make_spec(tmp_path, WAITS, name="b"))
            await until(lambda: ups(tmp_path, "b") == 1)
            groups = list(supervisor._running)
            assert guard._process is not first
            await asyncio.to_thread(guard.close)  # as if the launcher were gone: the new guard knows both
            await until(lambda: running_members(groups) == [])


def test_children_get_one_sleeping_compute_thread_and_none_of_the_users_settings():
    environ = child_environment(
        {"AGENTRL_MAX_STEPS": "3", "PATH": "/bin", "OMP_NUM_THREADS": "8"}, threads=1, drop_prefixes=("AGENTRL_",)
    )
    assert environ["OMP_NUM_THREADS"] == "1"
    assert environ["OMP_WAIT_POLICY"] == "PASSIVE"
    assert "AGENTRL_MAX_STEPS" not in environ
    assert environ["PATH"].endswith("/bin")


async def test_a_guard_that_died_is_replaced_without_anything_to_tell(tmp_path, fast):
    with closing(Guard(lock_descriptors=())) as guard:
        async with Supervisor(guard=guard) as supervisor:
            supervisor.start(make_spec(tmp_path, WAITS))
            await until(lambda: ups(tmp_path) == 1)
            first = guard._process
            assert first is not None
            first.kill()
            first.wait(timeout=DEADLINE_S)
            await until(lambda: guard._process is not first, supervisor=supervisor)
            groups = list(supervisor._running)
            await asyncio.to_thread(guard.close)  # as if the launcher were gone
            await until(lambda: running_members(groups) == [])


def test_a_launch_ends_what_a_launcher_killed_together_with_its_guard_left_behind(tmp_path, fast):
    lock = tmp_path / "launch.lock"
    launcher = f"""
        import asyncio, os
        from pathlib import Path
        from agentrl.cli.launch.supervisor import ChildSpec, Guard, Supervisor

        async def main():
            guard = Guard(lock_descriptors=[os.open({str(lock)!r}, os.O_RDWR | os.O_CREAT)])
            async with Supervisor(guard=guard) as supervisor:
                supervisor.start(ChildSpec(name="child", argv={(sys.executable, "-c", WAITS)!r},
                                           environ=dict(os.environ), log_path=Path({str(tmp_path / "child.log")!r})))
                await asyncio.sleep(0.1)
                print(guard._process.pid, *supervisor._running, flush=True)
                await asyncio.Event().wait()

        asyncio.run(main())
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(launcher)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        guard_id, orphan = (int(number) for number in process.stdout.readline().split())
        asyncio.run(until(lambda: ups(tmp_path) == 1))
    finally:
        process.send_signal(signal.SIGSTOP)
        os.kill(guard_id, signal.SIGKILL)
        process.kill()
        process.wait(timeout=DEADLINE_S)
        process.stdout.close()
    assert running_members([orphan]) == [orphan]
    descriptor = os.open(lock, os.O_RDWR)
    asyncio.run(launch_nothing(descriptor))
    os.close(descriptor)
    assert running_members([orphan]) == []


async def launch_nothing(lock_descriptor: int) -> None:
    with closing(Guard(lock_descriptors=[lock_descriptor])) as guard:
        async with Supervisor(guard=guard):
            pass


async def test_what_a_killed_child_started_in_a_session_of_its_own_ends_with_it(tmp_path, fast):
    code = f"""
        import subprocess, sys, signal
        deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + {WAITS!r}
        tool = subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True)
        print("tool", tool.pid, flush=True)
        signal.pause()
    """
    with closing(Guard(lock_descriptors=())) as guard:
        async with Supervisor(guard=guard) as supervisor:
            supervisor.start(make_spec(tmp_path, textwrap.dedent(code)))
            await until(lambda: ups(tmp_path) == 1)
            tool = int(next(line for line in (tmp_path / "child.log").read_text().splitlines() if "tool" in line)[5:])
            (child,) = supervisor._running
            os.kill(child, signal.SIGKILL)
            await until(lambda: ups(tmp_path) == 2, supervisor=supervisor)
            assert running_members([tool]) == []


async def test_a_stopped_child_and_one_whose_loop_is_stuck_are_killed_and_restarted(tmp_path, fast, monkeypatch):
    monkeypatch.setattr(module, "LIFE_POLL_S", 0.05)
    code = """
        import asyncio, time
        from agentrl.cli.pulse import beat_from_loop

        async def main():
            beating = asyncio.create_task(beat_from_loop())
            await asyncio.sleep(0.2)
            print("up", flush=True)
            {then}

        asyncio.run(main())
    """
    stuck = textwrap.dedent(code).format(then="time.sleep(60)")
    healthy = textwrap.dedent(code).format(then="await beating")
    with closing(Guard(lock_descriptors=())) as guard:
        async with Supervisor(guard=guard, hang_timeout_s=3.0) as supervisor:
            supervisor.start(replace(make_spec(tmp_path, stuck, name="stuck"), has_pulse=True))
            supervisor.start(replace(make_spec(tmp_path, healthy, name="healthy"), has_pulse=True))
            supervisor.start(make_spec(tmp_path, WAITS, name="stopped"))
            await until(lambda: all(ups(tmp_path, name) == 1 for name in ("stuck", "healthy", "stopped")))
            (stopped,) = (group for group, (spec, _) in supervisor._running.items() if spec.name == "stopped")
            os.kill(stopped, signal.SIGSTOP)
            await until(lambda: all(ups(tmp_path, name) == 2 for name in ("stuck", "stopped")), supervisor=supervisor)
            assert ups(tmp_path, "healthy") == 1
            assert supervisor.restarts == {"stuck": 1, "stopped": 1}
    assert not list(tmp_path.glob("*.pulse"))


async def test_a_trainer_that_an_alarm_ended_is_not_started_again(tmp_path, fast):
    with closing(Guard(lock_descriptors=())) as guard:
        async with Supervisor(guard=guard) as supervisor:
            supervisor.start(make_spec(tmp_path, "print('up', flush=True); raise SystemExit(3)", ends_run=True))
            await until(supervisor.check)
            assert ups(tmp_path) == 1
            assert not supervisor.restarts


async def test_samplers_without_money_are_not_restarted_and_the_budget_is_spent_when_the_last_has_ended(tmp_path, fast):
    with closing(Guard(lock_descriptors=())) as guard:
        async with Supervisor(guard=guard) as supervisor:
            assert not supervisor.is_budget_spent
            go = tmp_path / "go"
            waits = f"import pathlib, time\nwhile not pathlib.Path({str(go)!r}).exists(): time.sleep(0.02)\nexit(4)"
            supervisor.start(replace(make_spec(tmp_path, "print('up'); exit(4)", name="a"), spends=True))
            supervisor.start(replace(make_spec(tmp_path, waits, name="b"), spends=True))
            await until(lambda: supervisor._without_money["a"], supervisor=supervisor)
            assert not supervisor.is_budget_spent
            go.touch()
            await until(lambda: supervisor.is_budget_spent, supervisor=supervisor)
            assert (ups(tmp_path, "a"), supervisor.restarts.total()) == (1, 0)
