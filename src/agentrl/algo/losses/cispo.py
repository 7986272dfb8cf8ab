"""CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4-5): clip the importance weight, not the update."""

from __future__ import annotations

from agentrl.algo.losses.interface import Tokens, TokenTerms
from agentrl.config.sections import LossConfig


def cispo(tokens: Tokens, config: LossConfig) -> TokenTerms:
    """-clip(r, cispo_clip_low, cispo_clip_high) A log policy, the weight without gradient: every token keeps learning.

    The two bounds are absolute values of the ratio policy / old, not distances from 1.
    """
    ratios_N = tokens.log_ratio_N.detach().exp()
    weights_N = ratios_N.clamp(config.cispo_clip_low, config.cispo_clip_high)
    return TokenTerms(
        losses_N=-weights_N * tokens.advantages_N * tokens.policy_N,
        ratios_N=ratios_N,
        clipped_low_N=ratios_N < config.cispo_clip_low,
        clipped_high_N=ratios_N > config.cispo_clip_high,
    )
