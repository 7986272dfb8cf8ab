"""The judge and the browse agent of a run, as its `agent_config_path` describes them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from agentrl.algo.score_versions import scorer_of
from agentrl.chat import ChatFormat
from agentrl.cli.calls import read_spending
from agentrl.config import RunConfig
from agentrl.config.agent_config import AgentConfig, BrowseAgentConfig, ScorerAgentConfig, load_agent_config
from agentrl.errors import ConfigError
from agentrl.inference.chat import HttpChatModel
from agentrl.protocols import ChatModel, Store
from agentrl.rollout.browse import Browser
from agentrl.rollout.scoring import RecordScorer
from agentrl.rollout.spending import PaidChat
from agentrl.scoring import Judge, MCPScorerFactory, ScoringContext, parse_expression
from agentrl.types import DispatchKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Agents:
    """What a rollout process has beside the policy. None: not configured, or switched off."""

    scoring: RecordScorer
    browse_model: ChatModel | None
    browse_config: BrowseAgentConfig | None


def read_agent_config(config: RunConfig) -> AgentConfig:
    """The checked file; an empty one if the run names none. Raises ConfigError, UnavailableError."""
    path = config.rollout.agent_config_path
    return AgentConfig() if path is None else load_agent_config(path, environ=os.environ)


def check_judge_is_there(config: RunConfig, scorers: Iterable[str]) -> None:
    """Refuse Tasks that need a judge when none is configured, before anything is sampled. Raises ConfigError."""
    needing = sorted({scorer for scorer in scorers if MCPScorerFactory.needs_judge(scorer)})
    if needing and read_agent_config(config).judge is None:
        raise ConfigError(
            f"scorer {needing[0]!r} asks a judge: set --agent_config_path to a file whose scorer_agent is on, "
            "or choose a rule such as em, f1, gaia or math"
        )


def check_score_version(config: RunConfig) -> None:
    """Refuse a `score_version` whose scorer is unknown or lacks its judge. Raises ConfigError."""
    if config.algo.score_version is None:
        return
    scorer = scorer_of(config.algo.score_version)
    for name in parse_expression(scorer).names:
        MCPScorerFactory.check_name(name)
    check_judge_is_there(config, [scorer])


@asynccontextmanager
async def open_agents(config: RunConfig, store: Store) -> AsyncIterator[Agents]:
    """Judge and browse agent; their connections are closed at the end."""
    agents = read_agent_config(config)
    spending = read_spending(config, store=store)
    judge_model: ChatModel | None = None
    if agents.judge is not None:
        chat = HttpChatModel(agents.judge, parameters={"temperature": 0})
        judge_model = PaidChat(chat, kind=DispatchKind.JUDGE, spending=spending)
    browse_model: ChatModel | None = None
    if agents.browser is not None:
        browse_model = PaidChat(HttpChatModel(agents.browser), kind=DispatchKind.BROWSE, spending=spending)
    judge = None
    if judge_model is not None and agents.judge is not None:
        judge = Judge(
            chat=judge_model,
            cache=store,
            clock=lambda: datetime.now(UTC),
            template=agents.judge.judge_prompt_template,
        )
    context = ScoringContext(judge=judge, scorer_config={} if agents.judge is None else _with_keys(agents.judge))
    try:
        yield Agents(
            scoring=RecordScorer(context=context, store=store),
            browse_model=browse_model,
            browse_config=agents.browser,
        )
    finally:
        for model in (judge_model, browse_model):
            if model is not None:
                await model.close()


def browser_of(agents: Agents, *, chat: ChatFormat) -> Browser | None:
    """The browse agent as rollouts use it; `chat` counts tokens where its file names no tokenizer of its own.

    Raises UnavailableError if that tokenizer cannot be read.
    """
    if agents.browse_model is None or agents.browse_config is None:
        return None
    settings = agents.browse_config
    encode = chat.encode_text
    if settings.tokenizer_path is not None:
        encode = ChatFormat.load(settings.tokenizer_path).encode_text
    return Browser(
        model=agents.browse_model,
        tools=settings.browse_tools,
        min_result_tokens=settings.min_prompt_length,
        max_result_tokens=settings.max_prompt_length,
        default_purposes=settings.default_purpose,
        timeout_s=settings.timeout,
        encode=encode,
        clock=lambda: datetime.now(UTC),
    )


def _with_keys(judge: ScorerAgentConfig) -> dict[str, Any]:
    """What registered scorers get as their third argument: a plain dict, keys readable, as they call models with it."""
    keys = [endpoint.api_key for endpoint in judge.models]
    settings = judge.model_dump(mode="json")
    for model, key in zip(settings["models"], keys, strict=True):
        model["api_key"] = None if key is None else key.get_secret_value()
    return settings
