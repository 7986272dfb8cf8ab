"""AgentRL's drop mask: tokens whose ratio went too far leave the loss altogether."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.algo.losses.interface import LossInputs
from agentrl.config.sections import LossConfig


def within_drop_bounds(
    inputs: LossInputs, config: LossConfig, *, ratios_N: Tensor, advantages_N: Tensor
) -> Tensor | None:
    """True for tokens that stay; None where no drop mask is configured.

    A token is dropped if A > 0 and ratio > 1 + (epsilon + epsilon_higher) w, or A < 0 and ratio < 1 - epsilon w:

        strict_in_bound        w = 1: exactly the clip range
        out_of_date_decay      w = R exp(-decay * staleness): the older a token, the narrower
        otherwise              w = R = importance_weight_cap_ratio

    Dropped tokens still count in the denominators: those are fixed before the first micro-batch.
    """
    if not config.strict_in_bound and config.importance_weight_cap_ratio is None:
        return None
    width = _width(inputs, config)
    above_N = (advantages_N > 0) & (ratios_N > 1.0 + (config.epsilon + config.epsilon_higher) * width)
    below_N = (advantages_N < 0) & (ratios_N < 1.0 - config.epsilon * width)
    return ~(above_N | below_N)


def _width(inputs: LossInputs, config: LossConfig) -> Tensor | float:
    if config.strict_in_bound or config.importance_weight_cap_ratio is None:
        return 1.0
    if config.out_of_date_decay is None or inputs.policy_versions is None or inputs.current_version is None:
        return config.importance_weight_cap_ratio
    staleness_N = (inputs.current_version - inputs.policy_versions).clamp(min=0).to(inputs.policy_logprobs.dtype)
    return config.importance_weight_cap_ratio * torch.exp(-config.out_of_date_decay * staleness_N)
