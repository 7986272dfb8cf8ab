"""Rollouts: one Record from question to answer (`agent`), and the process that makes many (`worker`)."""

from agentrl.rollout.agent import Agent, RolloutResult, run_rollout
from agentrl.rollout.sampler import AsyncSampler, MCPSampler

__all__ = ["Agent", "AsyncSampler", "MCPSampler", "RolloutResult", "run_rollout"]
