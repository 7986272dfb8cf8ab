"""One chaos campaign: launch, wait for the first step, inject the schedule, let the run finish, note everything.

output/RUN/chaos.jsonl    one line per event: launched, fault, recovered, calm, end
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agentrl.cli.chaos.faults import Effect, Injector
from agentrl.cli.chaos.launched import LaunchedRun, newest_step, until
from agentrl.cli.chaos.schedule import PlannedFault
from agentrl.cli.chaos.victims import find_victims

FIRST_STEP_WITHIN_S = 1800.0  # the laptop profile builds its start model first
STALL_MARGIN_S = 120.0  # beyond the time the trainer itself waits for data
LOOK_S = 0.5


@dataclass(slots=True, kw_only=True)
class Suffered:
    """One fault as it happened. Times are seconds since the launch, and since the fault was over."""

    fault: PlannedFault
    at_s: float
    step: int  # newest step when it began
    lasted_s: float
    effect: Effect
    back_after_s: float | None = None  # until another process stood in for one that was killed
    step_after_s: float | None = None  # until the trainer then committed a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How the campaign went."""

    suffered: list[Suffered]
    exit_code: int | None  # of the launch; None: it stalled and was stopped
    last_step: int
    seconds: float

    @property
    def violations(self) -> list[str]:
        """Faults that broke a guarantee."""
        return [suffered.effect.seen for suffered in self.suffered if suffered.effect.is_violation]


@dataclass(slots=True, kw_only=True)
class Journal:
    """Writes events as JSON lines and tells them to `tell`."""

    path: Path
    tell: Callable[[str], None]
    _started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Since the campaign began."""
        return time.monotonic() - self._started

    def note(self, event: str, *, text: str, details: dict[str, Any] | None = None) -> None:
        """One event; on disk when it returns."""
        line = {"event": event, "at": datetime.now(UTC).isoformat(), "seconds": round(self.seconds, 2)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({**line, **(details or {}), "text": text}) + "\n")
        self.tell(f"{self.seconds:7.1f} s  {text}")


@dataclass(slots=True, kw_only=True)
class Campaign:
    """Tortures one launched run with the faults of a schedule."""

    run: LaunchedRun
    injector: Injector
    journal: Journal
    suffered: list[Suffered] = field(default_factory=list)
    _highest_step: int = 0

    async def carry_out(self, faults: Iterator[PlannedFault], *, minutes: float) -> Outcome:
        """Launch, inject for `minutes` from the first step on, then wait for the end of the run."""
        self.run.start()
        self.journal.note("launched", text=f"launched, output in {self.run.log_path}")
        try:
            first = self._step() + 1
            await self._reach(first, within_s=FIRST_STEP_WITHIN_S)
            async with asyncio.TaskGroup() as watchers:
                await self._inject_until(time.monotonic() + 60 * minutes, faults, watchers=watchers)
                self.journal.note("calm", text="no more faults; the run may finish")
                exit_code = await self._finish()
        finally:
            await self.run.stop()
        self.journal.note("end", text=f"launch ended with exit code {exit_code}", details={"exit_code": exit_code})
        return Outcome(
            suffered=self.suffered, exit_code=exit_code, last_step=self._step(), seconds=self.journal.seconds
        )

    async def _inject_until(
        self, deadline: float, faults: Iterator[PlannedFault], *, watchers: asyncio.TaskGroup
    ) -> None:
        for fault in faults:
            wanted = self._step() + fault.after_steps
            await self._reach(wanted, within_s=deadline - time.monotonic())
            await until(self._has_ended, within_s=min(fault.after_s, deadline - time.monotonic()))
            if self._has_ended() or time.monotonic() >= deadline:
                return
            await self._suffer(fault, watchers=watchers)

    async def _suffer(self, fault: PlannedFault, *, watchers: asyncio.TaskGroup) -> None:
        at_s, step = self.journal.seconds, self._step()
        effect = await self.injector.inject(fault)
        suffered = Suffered(fault=fault, at_s=at_s, step=step, lasted_s=self.journal.seconds - at_s, effect=effect)
        self.suffered.append(suffered)
        self.journal.note(
            "fault",
            text=f"step {step}  {fault.kind.name}  {effect.victim}: {effect.seen}",
            details={
                "planned": {**asdict(fault), "kind": fault.kind.name},
                "step": step,
                "began": round(at_s, 2),
                "lasted": round(suffered.lasted_s, 2),
                "effect": asdict(effect),
            },
        )
        watchers.create_task(self._watch_recovery(suffered))

    async def _watch_recovery(self, suffered: Suffered) -> None:
        """Note when a new process stands in for the killed one, and when a step is committed after that."""
        began, step = time.monotonic(), self._step()
        fault = suffered.fault
        awaits_process = suffered.effect.killed_pid is not None
        while not self._has_ended():
            if awaits_process and self._is_replaced(suffered):
                awaits_process = False
                suffered.back_after_s = time.monotonic() - began
                step = self._step()
            if not awaits_process and self._step() > step:
                suffered.step_after_s = time.monotonic() - began
                break
            await asyncio.sleep(LOOK_S)
        seconds = suffered.step_after_s
        reached = "the run ended first" if seconds is None else f"next step after {seconds:.1f} s"
        details = {"index": fault.index, "back_after": suffered.back_after_s, "step_after": seconds}
        self.journal.note("recovered", text=f"step {self._step()}  {fault.kind.name}: {reached}", details=details)

    def _is_replaced(self, suffered: Suffered) -> bool:
        running = find_victims(self.run.pid, target=suffered.fault.kind.target)
        is_gone = all(process.pid != suffered.effect.killed_pid for process in running)
        return is_gone and len(running) >= suffered.effect.num_running

    async def _finish(self) -> int | None:
        """Wait for the end of the launch; None if no step comes for longer than the trainer itself would wait."""
        patience_s = self.run.config.train.data_timeout_s + STALL_MARGIN_S
        while not self._has_ended():
            step = self._step()
            if not await self._reach(step + 1, within_s=patience_s):
                self.journal.note("stalled", text=f"no step after step {step} within {patience_s:.0f} s; stopping")
                await self.run.stop()
                return None
        return self.run.exit_code()

    async def _reach(self, step: int, *, within_s: float) -> bool:
        """Wait until this step is committed or the launch has ended; whether it came to that in time."""
        return await until(lambda: self._step() >= step or self._has_ended(), within_s=within_s)

    def _step(self) -> int:
        """The newest step there ever was: a trainer that resumes from a checkpoint goes through older ones again."""
        self._highest_step = max(self._highest_step, newest_step(self.run.config))
        return self._highest_step

    def _has_ended(self) -> bool:
        return self.run.exit_code() is not None
