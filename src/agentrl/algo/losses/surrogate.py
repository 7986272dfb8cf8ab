"""The clipped surrogate that GRPO, GSPO and CE-GPPO share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.config.sections import LossConfig


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClipSides:
    """Which tokens the one-sided clip catches. At a bound a token is inside."""

    low_N: Tensor  # advantage < 0 and ratio below the lower bound
    high_N: Tensor  # advantage > 0 and ratio above the upper bound


def clip_bounds(config: LossConfig) -> tuple[float, float]:
    """The clip range [1 - epsilon, 1 + epsilon + epsilon_higher]."""
    return 1.0 - config.epsilon, 1.0 + config.epsilon + config.epsilon_higher


def clip_sides(ratios_N: Tensor, advantages_N: Tensor, config: LossConfig) -> ClipSides:
    """Tokens whose ratio has already moved past the bound in the direction their advantage pushes."""
    low, high = clip_bounds(config)
    ratios_N = ratios_N.detach()
    return ClipSides(
        low_N=(advantages_N < 0) & (ratios_N < low),
        high_N=(advantages_N > 0) & (ratios_N > high),
    )


def clipped_surrogate(ratios_N: Tensor, advantages_N: Tensor, *, sides: ClipSides, config: LossConfig) -> Tensor:
    """-min(r A, clip(r) A) with an exact zero gradient for clipped tokens."""
    low, high = clip_bounds(config)
    losses_N = -ratios_N * advantages_N
    losses_N = torch.where(sides.low_N, -low * advantages_N, losses_N)
    return torch.where(sides.high_N, -high * advantages_N, losses_N)


def bound_negative(losses_N: Tensor, advantages_N: Tensor, config: LossConfig) -> Tensor:
    """Dual clip: for negative advantages the loss is at most `dual_clip` * |advantage|, without gradient there."""
    if config.dual_clip is None:
        return losses_N
    bounds_N = config.dual_clip * advantages_N.abs()
    return torch.where((advantages_N < 0) & (losses_N.detach() > bounds_N), bounds_N, losses_N)
