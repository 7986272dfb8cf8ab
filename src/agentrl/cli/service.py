"""Running one process of a run: logging, event loop, orderly end on SIGTERM and Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import uvloop

from agentrl.cli.pulse import beat_from_loop
from agentrl.config import RunConfig
from agentrl.telemetry import setup_logging

Result = TypeVar("Result")


def run_service(config: RunConfig, *, process_name: str, body: Callable[[asyncio.Event], Awaitable[None]]) -> int:
    """Run `body` with an event that is set on SIGTERM and SIGINT; exit code 0 if it then returns.

    Meanwhile the event loop shows its launcher, if it has one, that it turns.
    """

    async def beating(stop: asyncio.Event) -> None:
        pulse = asyncio.create_task(beat_from_loop())
        try:
            await body(stop)
        finally:
            pulse.cancel()

    is_verbose = sys.stderr.isatty()
    setup_logging(process_name, log_dir=config.run.log_dir, run_name=config.run.run_name, is_verbose=is_verbose)
    uvloop.run(with_stop_signals(beating))
    return 0


async def with_stop_signals(body: Callable[[asyncio.Event], Awaitable[Result]]) -> Result:
    """Call `body` with an event that SIGTERM and SIGINT set; a second signal has its usual, abrupt effect."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def request_stop(number: signal.Signals) -> None:
        stop.set()
        loop.remove_signal_handler(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, request_stop, number)
    return await body(stop)


async def until_stopped(work: Awaitable[None], *, stop: asyncio.Event) -> None:
    """Await `work`; when `stop` is set first, cancel it and let it clean up. Its own failure is raised."""
    running = asyncio.ensure_future(work)
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([running, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if running.done():
        running.result()
        return
    running.cancel()
    await asyncio.wait([running])
    if not running.cancelled():
        running.result()


def run_interruptible(work: Coroutine[Any, Any, Result], *, announce_stop: Callable[[], None] = lambda: None) -> Result:
    """Run `work` to its end. SIGTERM and Ctrl-C cancel it and let it clean up; then KeyboardInterrupt is raised."""

    async def body(stop: asyncio.Event) -> Result:
        running = asyncio.create_task(work)
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([running, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not running.done():
            announce_stop()
            running.cancel()
            await asyncio.wait([running])
        if running.cancelled():
            raise KeyboardInterrupt
        return running.result()

    result: Result = uvloop.run(with_stop_signals(body))
    return result
