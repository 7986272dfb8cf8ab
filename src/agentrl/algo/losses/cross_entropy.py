"""Cross-entropy: supervised fine-tuning on rows that are right by construction."""

from __future__ import annotations

import torch

from agentrl.algo.losses.interface import Tokens, TokenTerms
from agentrl.config.sections import LossConfig


def cross_entropy(tokens: Tokens, config: LossConfig) -> TokenTerms:
    """-log policy. Advantages are not looked at: every unmasked token is imitated."""
    del config
    nothing_N = torch.zeros_like(tokens.mask_N)
    return TokenTerms(
        losses_N=-tokens.policy_N,
        ratios_N=tokens.log_ratio_N.detach().exp(),
        clipped_low_N=nothing_N,
        clipped_high_N=nothing_N,
    )
