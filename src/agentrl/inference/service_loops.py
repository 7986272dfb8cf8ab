"""What the registrar of a run and that of a fleet do alike: loops until a stop, back-off, and asking for the load."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from typing import Any

from agentrl.errors import EngineError
from agentrl.inference.client import EngineClient, EngineLoad

logger = logging.getLogger(__name__)

GOODBYE_TIMEOUT_S = 5.0
CANCEL_AGAIN_S = 2.0
BACKOFF_FIRST_S = 0.2
_BACKOFF_MAX_S = 5.0
_BACKOFF_QUARANTINED_MAX_S = 30.0  # each attempt loads the weights again


async def run_until(stop: asyncio.Event, *, loops: Mapping[str, Coroutine[Any, Any, None]]) -> None:
    """Run endless loops, by the name of their task, until `stop` is set; the first that fails ends all.

    A loop is cancelled until it has ended: a library that turns a cancellation into its own time-out would lose it.
    """
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(loop, name=name) for name, loop in loops.items()]
        await stop.wait()
        while tasks:
            for task in tasks:
                task.cancel()
            _, running = await asyncio.wait(tasks, timeout=CANCEL_AGAIN_S)
            tasks = list(running)


def longer(backoff_s: float, *, is_quarantined: bool) -> float:
    """The pause after the next failure."""
    return min(_BACKOFF_QUARANTINED_MAX_S if is_quarantined else _BACKOFF_MAX_S, backoff_s * 2)


async def load_of(client: EngineClient, *, service_id: str) -> EngineLoad | None:
    """What runs and waits at a service; None, with a warning, if it does not say."""
    try:
        return await client.load()
    except EngineError as error:
        logger.warning("service %s does not tell its load: %s", service_id, error)
        return None
