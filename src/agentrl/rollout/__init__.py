"""Rollouts: one Record from question to answer (`agent`), and the process that makes many (`worker`)."""

from agentrl.rollout.agent import Agent, RolloutResult, run_rollout
from agentrl.rollout.context import initial_messages
from agentrl.rollout.conversation import Conversation, Reply
from agentrl.rollout.meta_sampler import MetaEpisodeSampler
from agentrl.rollout.sampler import AsyncSampler, MCPSampler

__all__ = [
    "Agent",
    "AsyncSampler",
    "Conversation",
    "MCPSampler",
    "MetaEpisodeSampler",
    "Reply",
    "RolloutResult",
    "initial_messages",
    "run_rollout",
]
