"""GSPO in its token form (arXiv 2507.18071, eq. 13-14): the ratio of the whole sequence, the gradient of each token."""

from __future__ import annotations

from agentrl.algo.losses.interface import Tokens, TokenTerms, clamp_log_ratio
from agentrl.algo.losses.surrogate import bound_negative, clip_sides, clipped_surrogate
from agentrl.config.sections import LossConfig

SEQUENCE_LOG_RATIO_HIGH = 10.0
"""A length-normalised ratio above exp(10) carries no information, only overflow."""


def gspo(tokens: Tokens, config: LossConfig) -> TokenTerms:
    """-min(s A, clip(s) A), s = exp(mean over the sequence's trained tokens of log(policy / old)).

    The value of s is the sequence's; its gradient is that of the token alone, so per-token advantages stay per token.
    """
    lengths_N = tokens.sum_by_sequence(tokens.mask_N.to(tokens.policy_N.dtype)).clamp(min=1.0)
    log_ratios_N = (tokens.policy_N - tokens.old_N).detach()
    sequence_log_ratio_N = tokens.sum_by_sequence(log_ratios_N) / lengths_N
    straight_through_N = tokens.policy_N - tokens.policy_N.detach()
    ratios_N = clamp_log_ratio(sequence_log_ratio_N + straight_through_N, high=SEQUENCE_LOG_RATIO_HIGH).exp()
    sides = clip_sides(ratios_N, tokens.advantages_N, config)
    losses_N = clipped_surrogate(ratios_N, tokens.advantages_N, sides=sides, config=config)
    return TokenTerms(
        losses_N=bound_negative(losses_N, tokens.advantages_N, config),
        ratios_N=ratios_N.detach(),
        clipped_low_N=sides.low_N,
        clipped_high_N=sides.high_N,
    )
