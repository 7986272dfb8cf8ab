"""Correction of the train/inference mismatch k = old / behaviour by detached weights on the policy term.

    mode        weight                                default bounds (low, high)
    tis         min(k, high), at least low            (none, 2)        truncated importance sampling
    mis         k where low <= k <= high, else 0      (none, 3)        masked importance sampling
    icepop      k where low <= k <= high, else 0      (0.5, 5)         IcePop: mis per token, two-sided
    geometric   1 where the sequence's geometric      (0.99, 1.01)     always per sequence
                mean of k is inside, else 0
    veto        1 unless any token of the sequence    (1e-4, none)     always per sequence
                has k outside, else 0

`rollout_correction_level = "sequence"` takes the product of k over the sequence for tis and mis. A behaviour log-prob
that is not finite rejects its token (its sequence where the mode works per sequence). Rejected tokens count in the
denominators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algo.losses.interface import clamp_log_ratio, sum_by_sequence
from agentrl.config.sections import LossConfig

PerSequence = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutWeights:
    """Factor of every token's policy term. `weights_N` is 0 where `kept_N` is False."""

    weights_N: Tensor
    kept_N: Tensor  # bool; False where masked or rejected


def rollout_weights(
    config: LossConfig,
    *,
    old_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    mean_weight: float | None = None,
) -> RolloutWeights:
    """Weights [N] of the configured correction, without gradient. Needs whole sequences.

    `mean_weight` divides the weights; it is the mean over the trained tokens of the whole optimizer step
    (`rollout_correction_normalize`), obtained by a first call without it.
    """
    unique_B, sequences_N = torch.unique(sequence_ids, return_inverse=True)
    num_sequences = int(unique_B.numel())
    mask_N = mask.bool()
    sane_N = ~mask_N | torch.isfinite(behaviour_logprobs)
    log_k_N = torch.where(mask_N & sane_N, (old_logprobs - behaviour_logprobs).detach(), 0.0)

    def per_sequence(values_N: Tensor) -> Tensor:
        return sum_by_sequence(values_N, sequences_N, num_sequences=num_sequences)

    is_per_sequence = (
        config.rollout_correction in {"geometric", "veto"} or config.rollout_correction_level == "sequence"
    )
    if is_per_sequence:
        sane_N = per_sequence((~sane_N).to(log_k_N.dtype)) == 0
    weights_N, inside_N = _weigh(config, log_k_N=log_k_N, mask_N=mask_N, per_sequence=per_sequence)
    kept_N = mask_N & sane_N & inside_N
    if mean_weight is not None:
        weights_N = weights_N / mean_weight
    return RolloutWeights(weights_N=torch.where(kept_N, weights_N, 0.0), kept_N=kept_N)


def _weigh(config: LossConfig, *, log_k_N: Tensor, mask_N: Tensor, per_sequence: PerSequence) -> tuple[Tensor, Tensor]:
    """Weight of every token and whether it is inside the bounds, before masking."""
    low, high = config.correction_bounds
    mode = config.rollout_correction
    if mode == "veto":
        k_N = clamp_log_ratio(log_k_N).exp()
        outside_N = mask_N & ((k_N < low) | (k_N > high))
        return torch.ones_like(log_k_N), per_sequence(outside_N.to(log_k_N.dtype)) == 0
    if mode == "geometric":
        lengths_N = per_sequence(mask_N.to(log_k_N.dtype)).clamp(min=1.0)
        mean_k_N = clamp_log_ratio(per_sequence(log_k_N) / lengths_N).exp()
        return torch.ones_like(log_k_N), (mean_k_N >= low) & (mean_k_N <= high)
    if config.rollout_correction_level == "sequence":
        log_k_N = per_sequence(log_k_N)
    k_N = clamp_log_ratio(log_k_N).exp()
    if mode == "tis":
        return k_N.clamp(low, high), torch.ones_like(mask_N)
    return k_N, (k_N >= low) & (k_N <= high)
