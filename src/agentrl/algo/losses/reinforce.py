"""REINFORCE: the plain policy gradient. With rloo advantages and a rollout correction it is RLOO with an IS weight."""

from __future__ import annotations

import torch

from agentrl.algo.losses.interface import Tokens, TokenTerms
from agentrl.config.sections import LossConfig


def reinforce(tokens: Tokens, config: LossConfig) -> TokenTerms:
    """-A log policy. The ratio policy / old is reported, never used: keep the data fresh."""
    del config
    nothing_N = torch.zeros_like(tokens.mask_N)
    return TokenTerms(
        losses_N=-tokens.advantages_N * tokens.policy_N,
        ratios_N=tokens.log_ratio_N.detach().exp(),
        clipped_low_N=nothing_N,
        clipped_high_N=nothing_N,
    )
