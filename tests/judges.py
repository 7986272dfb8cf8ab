"""A judge over the local chat server, for tests: `async with judge_for(server, store) as judge`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime

from agentrl.config.agent_config import ScorerAgentConfig
from agentrl.inference.chat import HttpChatModel
from agentrl.protocols import VerdictCache
from agentrl.scoring import Judge


@asynccontextmanager
async def judge_for(
    urls: Sequence[str], cache: VerdictCache, *, template: str | None = None, deadline_s: float = 5.0
) -> AsyncIterator[Judge]:
    models = [{"base_url": url, "model": f"judge-{number}"} for number, url in enumerate(urls)]
    config = ScorerAgentConfig.model_validate({"models": models, "max_retries": 2, "retry_delay": 0.01, "timeout": 1.0})
    chat = HttpChatModel(config, parameters={"temperature": 0})
    try:
        yield Judge(chat=chat, cache=cache, clock=lambda: datetime.now(UTC), template=template, deadline_s=deadline_s)
    finally:
        await chat.close()
