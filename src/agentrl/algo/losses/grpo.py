"""GRPO (arXiv 2402.03300): PPO's clipped surrogate with group-relative advantages. DAPO: epsilon_higher, token_mean."""

from __future__ import annotations

from agentrl.algo.losses.interface import Tokens, TokenTerms
from agentrl.algo.losses.surrogate import bound_negative, clip_sides, clipped_surrogate
from agentrl.config.sections import LossConfig


def grpo(tokens: Tokens, config: LossConfig) -> TokenTerms:
    """-min(r A, clip(r) A), with the token ratio r = policy / old; a clipped token has no gradient."""
    ratios_N = tokens.log_ratio_N.exp()
    sides = clip_sides(ratios_N, tokens.advantages_N, config)
    losses_N = clipped_surrogate(ratios_N, tokens.advantages_N, sides=sides, config=config)
    return TokenTerms(
        losses_N=bound_negative(losses_N, tokens.advantages_N, config),
        ratios_N=ratios_N.detach(),
        clipped_low_N=sides.low_N,
        clipped_high_N=sides.high_N,
    )
