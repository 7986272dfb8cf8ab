"""CE-GPPO (arXiv 2509.20712, eq. 8-10): clipped tokens keep a bounded gradient that steers entropy."""

from __future__ import annotations

import torch

from agentrl.algo.losses.interface import Tokens, TokenTerms
from agentrl.algo.losses.surrogate import bound_negative, clip_bounds, clip_sides
from agentrl.config.sections import LossConfig

DEFAULT_BETA1 = 0.75
DEFAULT_BETA2 = 1.0
"""The paper's values for a 7B model; (0.5, 1) for 1.5B."""


def ce_gppo(tokens: Tokens, config: LossConfig) -> TokenTerms:
    """-A r inside the clip range; outside it the ratio's value is beta times the bound, with a live gradient.

        ratio < low and A < 0     gradient factor beta1 * low
        ratio > high and A > 0    gradient factor beta2 * high

    beta1 = beta2 = 0 has GRPO's gradient. `strict_in_bound` drops exactly the tokens the betas are for.
    """
    beta1 = DEFAULT_BETA1 if config.beta1 is None else config.beta1
    beta2 = DEFAULT_BETA2 if config.beta2 is None else config.beta2
    low, high = clip_bounds(config)
    log_ratio_N = tokens.log_ratio_N
    ratios_N = log_ratio_N.exp()
    sides = clip_sides(ratios_N, tokens.advantages_N, config)
    live_one_N = (log_ratio_N - log_ratio_N.detach()).exp()
    kept_N = torch.where(sides.low_N, beta1 * low * live_one_N, ratios_N)
    kept_N = torch.where(sides.high_N, beta2 * high * live_one_N, kept_N)
    return TokenTerms(
        losses_N=bound_negative(-tokens.advantages_N * kept_N, tokens.advantages_N, config),
        ratios_N=ratios_N.detach(),
        clipped_low_N=sides.low_N,
        clipped_high_N=sides.high_N,
    )
