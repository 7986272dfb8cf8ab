"""Numbers every loss reports, built so that the parts of micro-batches and ranks combine exactly.

Each number is a sum of weight x value over trained tokens, like the loss, so the parts add up; `*_max` combine by
maximum. `combine_metrics` does that and divides the means by `weight_total` (1 under token_mean).

    loss                    the whole loss                                   (sum)
    policy_loss             its policy term                                  (sum)
    kl_loss                 kl_coef x KL penalty, only if configured         (sum)
    entropy_loss            -entropy_coef x entropy, only if configured      (sum)
    weight_total            sum of the token weights                         (sum)
    ratio_mean, ratio_max   importance ratio the loss looks at; far from 1: stale data or a diverging step
    approx_kl               r - 1 - log r: how far the policy moved from the old one since the rollout
    clip_fraction_low       tokens pushed down that are below the range already
    clip_fraction_high      tokens pushed up that are above it already; many: learning rate or staleness too high
    drop_fraction           tokens the drop mask took out
    reject_fraction         tokens the rollout correction rejected; many: trainer and engine disagree
    correction_weight_mean  mean weight of the rollout correction, rejected tokens as 0, only if configured
    mismatch_kl             k - 1 - log k with k = old / behaviour, only with behaviour log-probs
    kl_mean                 the KL estimate itself, only with reference log-probs
    entropy                 mean entropy, only where given; falling towards 0: collapse
    advantage_mean          after adv_scaling
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

SUMS = frozenset({"loss", "policy_loss", "kl_loss", "entropy_loss", "weight_total"})


def read_metrics(sums: Mapping[str, Tensor], *, ratios_N: Tensor) -> dict[str, float]:
    """Move all numbers of one micro-batch to the host at once."""
    ratio_max = torch.cat([ratios_N, ratios_N.new_zeros(1)]).max()
    scalars = {**sums, "ratio_max": ratio_max}
    values = torch.stack([scalar.detach().to(torch.float64) for scalar in scalars.values()]).tolist()
    return dict(zip(scalars, values, strict=True))


def combine_metrics(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of an optimizer step from those of its micro-batches on all ranks (apply once, to all parts).

    A number only some parts have (an empty filler micro-batch has none) counts as 0 in the others.
    """
    combined: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            if name.endswith("_max"):
                combined[name] = max(combined.get(name, value), value)
            else:
                combined[name] = combined.get(name, 0.0) + value
    total = combined.get("weight_total", 0.0)
    is_sum = {name: name in SUMS or name.endswith("_max") for name in combined}
    return {name: value if is_sum[name] else (value / total if total > 0 else 0.0) for name, value in combined.items()}
