"""MiniRL (arXiv 2512.01374, eq. 7): REINFORCE with a token-level importance weight and a one-sided mask."""

from __future__ import annotations

import torch

from agentrl.algo.losses.interface import Tokens, TokenTerms, clamp_log_ratio
from agentrl.algo.losses.surrogate import clip_sides
from agentrl.config.sections import LossConfig


def minirl(tokens: Tokens, config: LossConfig) -> TokenTerms:
    """-M min(policy / behaviour, is_cap) A log policy; M is 0 where policy / old left the clip range.

    The weight corrects both staleness and the train/inference mismatch, the mask only looks at staleness. Without
    behaviour log-probs the weight is policy / old. A masked token contributes nothing, so watch the clip fraction, not
    the value of the loss.
    """
    ratios_N = tokens.log_ratio_N.detach().exp()
    sampler_N = tokens.old_N if tokens.behaviour_N is None else tokens.behaviour_N
    importance_N = clamp_log_ratio((tokens.policy_N - sampler_N).detach()).exp()
    if config.is_cap is not None:
        importance_N = importance_N.clamp(max=config.is_cap)
    sides = clip_sides(ratios_N, tokens.advantages_N, config)
    losses_N = -importance_N * tokens.advantages_N * tokens.policy_N
    return TokenTerms(
        losses_N=torch.where(sides.low_N | sides.high_N, 0.0, losses_N),
        ratios_N=ratios_N,
        clipped_low_N=sides.low_N,
        clipped_high_N=sides.high_N,
    )
