"""Carrying out one planned fault on a launched run, and undoing it.

    kill                SIGKILL; the launcher itself is launched again
    pause, freeze       SIGSTOP, wait, SIGCONT: a hanging engine, tool server, database ...
    slow, reset,        the proxy between all processes and the database
      blackhole
    repeat-turn,        deliveries to the store that must change nothing
      late-claim
    full-disk           no file of the trainer may grow beyond 4 KiB (RLIMIT_FSIZE): its next checkpoint, policy or
                        log line fails in the middle of a write, as on a full disk, with EFBIG in place of ENOSPC

Processes are descendants of the launcher that chaos started, and only ever signalled by id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil

from agentrl.cli.chaos.launched import LaunchedRun, until
from agentrl.cli.chaos.proxy import Proxy
from agentrl.cli.chaos.redelivery import AcceptedError, deliver_late, repeat_turn
from agentrl.cli.chaos.schedule import Action, PlannedFault, Target
from agentrl.cli.chaos.victims import find_victims
from agentrl.cli.connect import open_run_store
from agentrl.errors import StoreError, UnavailableError

VICTIM_WITHIN_S = 20.0  # for one that is just being restarted
NUM_RESETS = 3
DELIVERY_ATTEMPTS = 3
FULL_DISK_BYTES = 4096
FULL_DISK_AT_MOST_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What a fault hit, and what was seen of it at once."""

    victim: str
    seen: str
    killed_pid: int | None = None
    num_running: int = 0  # processes of the target before it
    is_violation: bool = False  # a guarantee was broken


@dataclass(frozen=True, slots=True, kw_only=True)
class Injector:
    """Carries out faults on one run. When `inject` returns, the fault is over and only its consequences remain."""

    run: LaunchedRun
    proxy: Proxy | None

    async def inject(self, fault: PlannedFault) -> Effect:
        """Do it, hold it, undo it."""
        target = fault.kind.target
        if target is Target.CONNECTION:
            return await self._disturb_connections(fault)
        if target in {Target.TURN, Target.CLAIM}:
            return await self._deliver_again(target)
        running = await self._find(target)
        if not running:
            return Effect(victim=str(target), seen="not running, nothing done")
        victim = running[fault.victim % len(running)]
        try:
            return await self._torment(fault, victim, num_running=len(running))
        except psutil.NoSuchProcess:
            return Effect(victim=_describe(fault, victim), seen="had just ended, nothing done")

    async def _find(self, target: Target) -> list[psutil.Process]:
        """The target's running processes. There may be fewer than the schedule knows of: victims are counted around."""
        running: list[psutil.Process] = []

        def is_there() -> bool:
            running[:] = find_victims(self.run.pid, target=target)
            return bool(running) or self.run.exit_code() is not None

        await until(is_there, within_s=VICTIM_WITHIN_S)
        return running

    async def _torment(self, fault: PlannedFault, victim: psutil.Process, *, num_running: int) -> Effect:
        described = _describe(fault, victim)
        if fault.kind.action is Action.FULL:
            return Effect(victim=described, seen=await fill_disk(victim))
        if fault.kind.action is not Action.KILL:
            held_s = fault.held_s
            family = [victim, *victim.children(recursive=True)] if fault.kind.target is Target.TOOL else [victim]
            await hold(family, for_s=held_s)
            return Effect(victim=described, seen=f"stopped for {held_s:.1f} s")
        if fault.kind.target is Target.LAUNCHER:
            await self.run.kill_and_restart()
            return Effect(victim=described, seen="launched again")
        victim.kill()
        return Effect(victim=described, seen="killed", killed_pid=victim.pid, num_running=num_running)

    async def _disturb_connections(self, fault: PlannedFault) -> Effect:
        assert self.proxy is not None
        held_s = fault.held_s
        victim = f"{self.proxy.num_connections} connections"
        try:
            if fault.kind.action is Action.SLOW:
                self.proxy.slow(latency_s=fault.latency_s)
                await asyncio.sleep(held_s)
                return Effect(victim=victim, seen=f"{1000 * fault.latency_s:.0f} ms each way for {held_s:.1f} s")
            if fault.kind.action is Action.BLACKHOLE:
                self.proxy.swallow()
                await asyncio.sleep(held_s)
                return Effect(victim=victim, seen=f"nothing passed for {held_s:.1f} s")
            return Effect(victim=victim, seen=f"reset {await self._reset_repeatedly(self.proxy, for_s=held_s)}")
        finally:
            self.proxy.heal()

    @staticmethod
    async def _reset_repeatedly(proxy: Proxy, *, for_s: float) -> str:
        counts = []
        for _ in range(NUM_RESETS):
            counts.append(proxy.reset())
            await asyncio.sleep(for_s / NUM_RESETS)
        return " + ".join(map(str, counts))

    async def _deliver_again(self, target: Target) -> Effect:
        deliver = repeat_turn if target is Target.TURN else deliver_late
        for attempt in range(1, DELIVERY_ATTEMPTS + 1):
            try:
                async with open_run_store(self.run.config) as store:
                    return Effect(victim=str(target), seen=await deliver(store))
            except AcceptedError as error:
                return Effect(victim=str(target), seen=str(error), is_violation=True)
            except (StoreError, UnavailableError) as error:  # the database may still suffer from the fault before
                if attempt == DELIVERY_ATTEMPTS or self.run.exit_code() is not None:
                    return Effect(victim=str(target), seen=f"nothing delivered: {error}")
        raise AssertionError("the last attempt returns")


async def hold(processes: Sequence[psutil.Process], *, for_s: float) -> None:
    """Stop the processes for a while. They go on whatever happens here."""
    try:
        _each(processes, lambda process: process.suspend())
        await asyncio.sleep(for_s)
    finally:
        _each(processes, lambda process: process.resume())


def _each(processes: Sequence[psutil.Process], act: Callable[[psutil.Process], None]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            act(process)


async def fill_disk(process: psutil.Process) -> str:
    """Let no file of the process grow until it has ended of that, or the time is over; then lift the limit."""
    soft, hard = process.rlimit(psutil.RLIMIT_FSIZE)
    process.rlimit(psutil.RLIMIT_FSIZE, (FULL_DISK_BYTES, hard))
    try:
        if await until(lambda: has_ended(process), within_s=FULL_DISK_AT_MOST_S):
            return "its writes failed and it ended"
        return f"survived {FULL_DISK_AT_MOST_S:.0f} s"
    finally:
        with suppress(psutil.NoSuchProcess):
            process.rlimit(psutil.RLIMIT_FSIZE, (soft, hard))


def has_ended(process: psutil.Process) -> bool:
    """Whether the process is gone or only waits to be collected."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _describe(fault: PlannedFault, process: psutil.Process) -> str:
    return f"{fault.kind.target} {fault.victim} ({process.pid})"
