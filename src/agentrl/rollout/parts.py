"""What the rollouts of one run work with, opened together and handed on together."""

from __future__ import annotations

from dataclasses import dataclass, field

from agentrl.chat import ChatFormat
from agentrl.config import RunConfig
from agentrl.protocols import GenerationClient, Store, Toolbox
from agentrl.rollout.browse import Browser
from agentrl.rollout.sampler import AsyncSampler, MCPSampler
from agentrl.rollout.scoring import RecordScorer
from agentrl.rollout.tool_calls import ToolCaller


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """What the rollouts of one run work with."""

    config: RunConfig
    store: Store
    toolbox: Toolbox
    client: GenerationClient
    chat: ChatFormat
    scoring: RecordScorer = field(default_factory=RecordScorer)  # by rules alone
    browser: Browser | None = None
    sampler_class: type[AsyncSampler] = MCPSampler
    caller: ToolCaller | None = None  # None: tools are called live, without prices
