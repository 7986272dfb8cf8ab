"""Notices an embedded engine whose thread no longer comes round: its server would go on answering in vain."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from agentrl.inference.engine import Engine, EngineStoppedError

logger = logging.getLogger(__name__)

LOOK_S = 5.0
HANG_S = 180.0  # far above the longest step


async def fail_when_stuck(engine: Engine, *, look_s: float = LOOK_S, limit_s: float = HANG_S) -> None:
    """Call an engine failed whose thread has not come round for `limit_s`. Loading weights may take any time."""
    while not engine.has_stopped:
        await asyncio.sleep(look_s)
        with suppress(EngineStoppedError):
            answer = asyncio.wrap_future(engine.stats())
            await asyncio.wait({answer}, timeout=limit_s)
            if not answer.done() and not engine.is_loading:
                logger.error("the engine thread has not come round for %.0f s", limit_s)
                engine.fail(TimeoutError(f"the engine thread was stuck for {limit_s:.0f} s"))
                return
