"""Keeps the processes of a run alive: one process group and one log file each, restart with back-off, orderly stop.

    Supervisor.start(spec) ──► child runs ──► ends unexpectedly, or hangs and is ended ──► back-off ──► child runs ...
                                                   └── too often without progress: ChildFailedError, everything stops

What hangs is told by `life.py`. A guard process (`guard.py`) ends the same groups if the launcher itself is killed; a
guard that is killed is replaced. What gets past both, the next launch ends (`leftovers.py`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.cli.exit_codes import EXIT_BUDGET, EXIT_STOPPED, EXIT_USER_ERROR
from agentrl.cli.launch.groups import end_groups
from agentrl.cli.launch.guard import longest_end_s
from agentrl.cli.launch.leftovers import end_launches, end_life, new_mark
from agentrl.cli.launch.life import LifeWatch, stopped_groups
from agentrl.config.marks import LAUNCH_MARK, PULSE_FILE
from agentrl.errors import AgentRLError, UserError

logger = logging.getLogger(__name__)

MAX_FAILURES_WITHOUT_PROGRESS = 5
FIRST_BACK_OFF_S = 0.5
LONGEST_BACK_OFF_S = 8.0
STOP_GRACE_S = 15.0
LOCK_WAIT_S = longest_end_s(STOP_GRACE_S)  # for the locks that the guard of an earlier launch still holds
LEFTOVER_GRACE_S = 3.0
GUARD_POLL_S = 0.5
EXIT_POLL_S = 0.05
LIFE_POLL_S = 1.0
HANG_TIMEOUT_S = 180.0
LOG_TAIL_LINES = 15
SAYING = "agentrl: "


class ChildFailedError(AgentRLError):
    """A process of the run cannot be kept alive. The message holds the end of its log."""


class ChildRefusedError(ChildFailedError, UserError):
    """A process of the run refused what it was given, in the first life. The message holds its own one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """One process of the run."""

    name: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    log_path: Path
    stop_stage: int = 0  # 0 stops first; a stage starts to stop when the one before is down
    ends_run: bool = False  # exit code 0: the run is complete; EXIT_STOPPED, EXIT_BUDGET: an alarm or a budget ended it
    spends: bool = False  # exit code EXIT_BUDGET means that it has no money left, and is not started again
    has_pulse: bool = False  # it touches the file that PULSE_FILE names (`cli/pulse.py`)
    while_stopping: Callable[[], object] = lambda: None  # called again and again between SIGTERM and its end

    @property
    def pulse_file(self) -> Path | None:
        """Where its sign of life is looked for."""
        return self.log_path.with_suffix(".pulse") if self.has_pulse else None


@dataclass(slots=True, kw_only=True)
class Guard:
    """The launcher's end of the watchdog: registers process groups with it."""

    lock_descriptors: Sequence[int]
    grace_s: float = STOP_GRACE_S
    _stages: dict[int, int] = field(default_factory=dict)
    _process: subprocess.Popen[str] | None = None

    def track(self, group_id: int, *, stage: int) -> None:
        """Have this group ended should the launcher die."""
        self._stages[group_id] = stage
        self._tell(f"+{group_id} {stage}")

    def forget(self, group_id: int) -> None:
        """The group is gone; its number may be used by others."""
        self._stages.pop(group_id, None)
        self._tell(f"-{group_id}")

    def close(self) -> None:
        """Let the guard go; it ends what is still tracked."""
        if self._process is not None:
            self._process.communicate(timeout=longest_end_s(self.grace_s))

    def keep_alive(self) -> None:
        """Replace a guard that died, and tell the new one everything."""
        if self._stages and (self._process is None or self._process.poll() is not None):
            self._start()

    def _tell(self, line: str) -> None:
        """Send one line, or everything to a new guard if the old one died."""
        if self._process is None or self._process.poll() is not None:
            self._start()
            return
        try:
            self._write(self._process, line)
        except BrokenPipeError:  # it died just now
            self._process.wait(timeout=self.grace_s)
            self._start()

    def _start(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.guard", str(self.grace_s), *map(str, self.lock_descriptors)],
            stdin=subprocess.PIPE,
            start_new_session=True,
            pass_fds=tuple(self.lock_descriptors),
            text=True,
        )
        self._write(self._process, "\n".join(f"+{group_id} {stage}" for group_id, stage in self._stages.items()))

    @staticmethod
    def _write(process: subprocess.Popen[str], lines: str) -> None:
        if process.stdin is not None and lines:
            process.stdin.write(lines + "\n")
            process.stdin.flush()


@dataclass(slots=True, kw_only=True)
class Supervisor:
    """Owns the children of one launch. Use as an async context manager: leaving it stops them all."""

    guard: Guard
    hang_timeout_s: float = HANG_TIMEOUT_S
    restarts: Counter[str] = field(default_factory=Counter)
    _failures: Counter[str] = field(default_factory=Counter)
    _running: dict[int, tuple[ChildSpec, subprocess.Popen[bytes]]] = field(default_factory=dict)  # by process group
    _keepers: list[asyncio.Task[bool]] = field(default_factory=list)
    _without_money: dict[str, bool] = field(default_factory=dict)  # by name, of children that spend
    _marks: dict[int, str] = field(default_factory=dict)  # by process group
    _guard_keeper: asyncio.Task[None] | None = None
    _stopped: frozenset[int] = frozenset()
    _stopped_read_at: float = float("-inf")  # monotonic seconds

    async def __aenter__(self) -> Supervisor:
        if num_ended := await asyncio.to_thread(end_launches, self.guard.lock_descriptors, grace_s=LEFTOVER_GRACE_S):
            logger.warning("ended %d processes that an earlier launch of this run left behind", num_ended)
        self._guard_keeper = asyncio.create_task(self._keep_guard(), name="guard")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    def start(self, spec: ChildSpec) -> None:
        """Start a child and keep it alive."""
        if spec.spends:
            self._without_money[spec.name] = False
        self._keepers.append(asyncio.create_task(self._keep(spec), name=spec.name))

    async def run_once(self, spec: ChildSpec) -> None:
        """Run a child to its end. Raises ChildFailedError if its exit code is not 0."""
        code = await self._run(spec)
        if code != 0:
            raise ChildFailedError(_describe_failure(spec, code, attempts=1))

    def has_child(self, process_id: int) -> bool:
        """Whether this is a process that runs for this launch now."""
        return process_id in self._running

    def note_progress(self) -> None:
        """The run moved on: earlier failures no longer count as being in a row."""
        self._failures.clear()

    def check(self) -> bool:
        """Whether the child that ends the run has ended it. Raises ChildFailedError if one cannot be kept alive."""
        if self._guard_keeper is not None and self._guard_keeper.done():
            self._guard_keeper.result()
        return any(keeper.done() and keeper.result() for keeper in self._keepers)

    @property
    def is_budget_spent(self) -> bool:
        """Whether every child that spends has ended because nothing is left to spend."""
        return bool(self._without_money) and all(self._without_money.values())

    async def stop(self) -> None:
        """End all children, stage by stage, each stage within a bound."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self._keepers.clear()
        if self._guard_keeper is not None:
            self._guard_keeper.cancel()
        for stage in sorted({spec.stop_stage for spec, _ in self._running.values()}):
            ending = {group: spec for group, (spec, _) in self._running.items() if spec.stop_stage == stage}
            await asyncio.to_thread(_end_all, ending)
            for group_id in ending:
                await self._forget(group_id)

    async def _keep(self, spec: ChildSpec) -> bool:
        """Restart the child until it ends the run (True) or fails too often in a row."""
        while True:
            code = await self._run(spec)
            if spec.ends_run and code in {0, EXIT_STOPPED, EXIT_BUDGET}:
                return True
            if spec.spends and code == EXIT_BUDGET:
                self._without_money[spec.name] = True
                return False
            self._failures[spec.name] += 1
            failures = self._failures[spec.name]
            is_hopeless = code == EXIT_USER_ERROR and self.restarts[spec.name] == 0  # later: a peer may be restarting
            if is_hopeless:
                raise ChildRefusedError(_describe_refusal(spec))
            if failures > MAX_FAILURES_WITHOUT_PROGRESS:
                raise ChildFailedError(_describe_failure(spec, code, attempts=failures))
            logger.warning("%s ended with exit code %d; restart %d", spec.name, code, self.restarts[spec.name] + 1)
            await asyncio.sleep(min(LONGEST_BACK_OFF_S, FIRST_BACK_OFF_S * 2 ** (failures - 1)))
            self.restarts[spec.name] += 1

    async def _run(self, spec: ChildSpec) -> int:
        """One life of a child, and of whatever it started in its group."""
        process = self._spawn(spec)
        life = LifeWatch(pulse_file=spec.pulse_file, limit_s=self.hang_timeout_s, looked_at=time.monotonic())
        while (code := process.poll()) is None:
            await asyncio.sleep(EXIT_POLL_S)
            now = time.monotonic()
            if now - life.looked_at < LIFE_POLL_S:
                continue
            if (trouble := life.look(now, is_stopped=process.pid in self._stopped_groups(now))) is not None:
                logger.warning("%s %s: ending it", spec.name, trouble)
                await asyncio.to_thread(end_groups, [process.pid], grace_s=STOP_GRACE_S)
        await asyncio.to_thread(end_groups, [process.pid], grace_s=STOP_GRACE_S)
        await self._forget(process.pid)
        return code

    def _stopped_groups(self, now: float) -> frozenset[int]:
        """One look at all processes of the machine for all children."""
        if now - self._stopped_read_at >= LIFE_POLL_S:
            self._stopped, self._stopped_read_at = stopped_groups(self._running), now
        return self._stopped

    async def _keep_guard(self) -> None:
        while True:
            self.guard.keep_alive()
            await asyncio.sleep(GUARD_POLL_S)

    def _spawn(self, spec: ChildSpec) -> subprocess.Popen[bytes]:
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        mark = new_mark(self.guard.lock_descriptors)
        environ = {**spec.environ, LAUNCH_MARK: mark}
        if spec.pulse_file is not None:
            spec.pulse_file.unlink(missing_ok=True)  # of the life before
            environ[PULSE_FILE] = str(spec.pulse_file.absolute())
        with spec.log_path.open("ab") as log:
            process = subprocess.Popen(
                spec.argv,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        self._running[process.pid] = (spec, process)
        self._marks[process.pid] = mark
        self.guard.track(process.pid, stage=spec.stop_stage)
        return process

    async def _forget(self, group_id: int) -> None:
        """Collect the exit status of a group that is down, and end what it started outside the group."""
        spec, process = self._running[group_id]
        process.wait(timeout=STOP_GRACE_S)
        await asyncio.to_thread(end_life, self._marks[group_id], grace_s=LEFTOVER_GRACE_S)
        self.guard.forget(group_id)
        if spec.pulse_file is not None:
            spec.pulse_file.unlink(missing_ok=True)
        del self._running[group_id], self._marks[group_id]


def child_environment(environ: Mapping[str, str], *, threads: int, drop_prefixes: Sequence[str]) -> dict[str, str]:
    """The environment of a child: `threads` compute threads that sleep when idle, and no settings of its own.

    Spinning threads of several processes on few cores slow each other down by an order of magnitude.
    """
    kept = {name: value for name, value in environ.items() if not name.startswith(tuple(drop_prefixes))}
    pools = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    programs = f"{Path(sys.executable).parent}{os.pathsep}{environ.get('PATH', os.defpath)}"
    return {
        **kept,
        "PATH": programs,  # `python` in a tool server's command is this environment's
        **dict.fromkeys(pools, str(threads)),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


def log_tail(path: Path) -> str:
    """The last lines of a log file."""
    return "\n".join(f"    {line}" for line in _last_lines(path)[-LOG_TAIL_LINES:])


def _last_lines(path: Path) -> list[str]:
    with path.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - 16_384))
        return log.read().decode("utf-8", errors="replace").splitlines()


def _describe_refusal(spec: ChildSpec) -> str:
    """What the child said when it left, as every command does, with `agentrl: ` before it."""
    said = [line for line in _last_lines(spec.log_path) if line.startswith(SAYING)]
    if not said:
        return _describe_failure(spec, EXIT_USER_ERROR, attempts=1)
    return f"{spec.name}: {said[-1].removeprefix(SAYING)} ({spec.log_path})"


def _describe_failure(spec: ChildSpec, code: int, *, attempts: int) -> str:
    times = "" if attempts == 1 else f" {attempts} times in a row without progress"
    return f"{spec.name} ended{times}, exit code {code}. The end of {spec.log_path}:\n{log_tail(spec.log_path)}"


def _end_all(ending: Mapping[int, ChildSpec]) -> None:
    end_groups(ending, grace_s=STOP_GRACE_S, while_waiting=lambda: [spec.while_stopping() for spec in ending.values()])
