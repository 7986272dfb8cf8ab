"""The trainer's own log-probs of the canary prompts: what every inference service must answer at a policy version."""

from __future__ import annotations

import torch

from agentrl.algo.canary import canary_prompts
from agentrl.train.session import Session
from agentrl.types import CanaryReference

CANARY_TEMPERATURE = 1.0  # engines score prompts, and decode greedily, at this one


@torch.no_grad()
def canary_reference(session: Session) -> CanaryReference:
    """One forward over the canary prompts with the current weights. Every rank must call it: weights may be sharded."""
    policy = session.policy
    prompts = canary_prompts(policy.causal_lm.config.get_text_config().vocab_size)
    ids_BT = torch.tensor(prompts, device=session.accelerator.device)
    positions_BT = torch.arange(ids_BT.numel(), device=ids_BT.device).view_as(ids_BT)
    sampling_temperature, policy.temperature = policy.temperature, CANARY_TEMPERATURE
    was_training = policy.training
    policy.eval()
    try:
        logprobs_N, _ = session.learner.policy(ids_BT, positions_BT[:, :-1].flatten(), ids_BT[:, 1:].flatten())
    finally:
        policy.temperature = sampling_temperature
        policy.train(was_training)
    return CanaryReference(prompts=prompts, logprobs=tuple(logprobs_N.float().cpu().tolist()))
