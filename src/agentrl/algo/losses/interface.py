"""What goes into a loss, what comes out, and the cleaned view every loss works on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.config.sections import LossConfig
from agentrl.errors import ConfigError

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-this before exp; a token beyond it gets no gradient through its ratio."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """The N tokens of one micro-batch, sequences laid end to end. All tensors are 1-D of length N.

    Whatever lies where `mask` is False (NaN and infinities included) has no influence on loss or gradient.
    """

    policy_logprobs: Tensor  # of the policy being trained, at the sampling temperature; requires grad
    advantages: Tensor
    mask: Tensor  # bool: sampled by the policy and trained
    sequence_ids: Tensor  # int64: tokens of one sequence share an id; a sequence is never split over micro-batches
    weights: Tensor  # from token_weights, fixed for the whole optimizer step
    old_logprobs: Tensor | None = None  # None: the policy itself without gradient, so that every ratio is 1
    behaviour_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    entropy: Tensor | None = None  # of the policy's distribution at each token; requires grad if entropy_coef > 0
    policy_versions: Tensor | None = None  # int: version that sampled the token
    current_version: int | None = None  # version being trained; with policy_versions it gives the staleness
    mean_rollout_weight: float | None = None  # of the whole optimizer step, for rollout_correction_normalize


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossOutputs:
    """The share of one micro-batch in the loss of the optimizer step. Shares add up; no further division.

    The policy term of `loss` is the sum of inputs.weights x factors x token_losses.
    """

    loss: Tensor  # scalar, to be minimised
    token_losses: (
        Tensor  # [N] policy term of each token alone: before drop mask, correction and weights; 0 where masked
    )
    metrics: dict[str, float]  # see agentrl.algo.losses.metrics
    ratios: Tensor  # [N] the importance ratio this loss looked at, no gradient
    clipped: Tensor  # [N] bool: the clip took the gradient away or capped it
    factors: Tensor  # [N] 0 where masked, dropped or rejected; elsewhere the correction's weight, 1 without one


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokens:
    """LossInputs with neutral values under the mask: nothing here can be NaN because of an untrained token."""

    policy_N: Tensor
    old_N: Tensor  # no gradient
    behaviour_N: Tensor | None  # no gradient
    advantages_N: Tensor  # scaled by adv_scaling
    log_ratio_N: Tensor  # log(policy / old), clamped: no gradient beyond the clamp
    mask_N: Tensor
    sequences_N: Tensor  # int64, 0 .. num_sequences - 1
    num_sequences: int

    def sum_by_sequence(self, values_N: Tensor) -> Tensor:
        """Sum over the tokens of each sequence, handed back to every token of it."""
        return sum_by_sequence(values_N, self.sequences_N, num_sequences=self.num_sequences)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenTerms:
    """What one loss says about every token, before drop mask, rollout correction and weights."""

    losses_N: Tensor
    ratios_N: Tensor  # no gradient
    clipped_low_N: Tensor  # bool
    clipped_high_N: Tensor  # bool


PolicyTerm = Callable[[Tokens, LossConfig], TokenTerms]
"""A loss: one file in this package and one line in `registry.py`."""


def clamp_log_ratio(log_ratio_N: Tensor, *, high: float = LOG_RATIO_LIMIT) -> Tensor:
    """Keep exp finite."""
    return log_ratio_N.clamp(-LOG_RATIO_LIMIT, high)


def sum_by_sequence(values_N: Tensor, sequences_N: Tensor, *, num_sequences: int) -> Tensor:
    """Sum over the tokens of each sequence, handed back to every token of it."""
    sums_B = values_N.new_zeros(num_sequences).index_add(0, sequences_N, values_N)
    return sums_B[sequences_N]


def clean_tokens(inputs: LossInputs, config: LossConfig) -> Tokens:
    """Select with where before any arithmetic, and lift to at least float32."""
    dtype = torch.promote_types(inputs.policy_logprobs.dtype, torch.float32)
    mask_N = inputs.mask.bool()
    unique_B, sequences_N = torch.unique(inputs.sequence_ids, return_inverse=True)
    policy_N = select(inputs.policy_logprobs, mask_N, dtype=dtype)
    old, behaviour = inputs.old_logprobs, inputs.behaviour_logprobs
    old_N = policy_N.detach() if old is None else select(old.detach(), mask_N, dtype=dtype)
    return Tokens(
        policy_N=policy_N,
        old_N=old_N,
        log_ratio_N=clamp_log_ratio(policy_N - old_N),
        behaviour_N=None if behaviour is None else select(behaviour.detach(), mask_N, dtype=dtype),
        advantages_N=select(inputs.advantages.detach(), mask_N, dtype=dtype) * config.adv_scaling,
        mask_N=mask_N,
        sequences_N=sequences_N,
        num_sequences=int(unique_B.numel()),
    )


def select(values_N: Tensor, mask_N: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Values where the mask is True, 0 elsewhere; no gradient reaches the other values, whatever they are."""
    return torch.where(mask_N, values_N.to(dtype), 0.0)


def check_inputs(inputs: LossInputs, config: LossConfig) -> None:
    """Refuse tensors that do not line up, and a term whose tensor is missing: it would silently be no term at all.

    Raises ConfigError for a missing tensor, ValueError for a wrong shape.
    """
    needs: dict[str, tuple[bool, dict[str, object]]] = {
        f'rollout_correction = "{config.rollout_correction}"': (
            config.rollout_correction != "none",
            {"behaviour_logprobs": inputs.behaviour_logprobs},
        ),
        "rollout_correction_normalize": (
            config.rollout_correction_normalize,
            {"mean_rollout_weight": inputs.mean_rollout_weight},
        ),
        f"kl_coef = {config.kl_coef}": (config.kl_coef > 0, {"reference_logprobs": inputs.reference_logprobs}),
        f"entropy_coef = {config.entropy_coef}": (config.entropy_coef > 0, {"entropy": inputs.entropy}),
        f"out_of_date_decay = {config.out_of_date_decay}": (
            config.out_of_date_decay is not None and not config.strict_in_bound,
            {"policy_versions": inputs.policy_versions, "current_version": inputs.current_version},
        ),
    }
    for setting, (is_active, required) in needs.items():
        for name, value in required.items():
            if is_active and value is None:
                raise ConfigError(f"{setting} needs LossInputs.{name}, which is None: provide it or unset the option")
    _check_shapes(inputs)


def _check_shapes(inputs: LossInputs) -> None:
    shape = inputs.policy_logprobs.shape
    if len(shape) != 1:
        raise ValueError(f"policy_logprobs has shape {tuple(shape)}: a loss takes 1-D tensors over the batch's tokens")
    others = {
        "advantages": inputs.advantages,
        "mask": inputs.mask,
        "sequence_ids": inputs.sequence_ids,
        "weights": inputs.weights,
        "old_logprobs": inputs.old_logprobs,
        "behaviour_logprobs": inputs.behaviour_logprobs,
        "reference_logprobs": inputs.reference_logprobs,
        "entropy": inputs.entropy,
        "policy_versions": inputs.policy_versions,
    }
    for name, tensor in others.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, policy_logprobs has {tuple(shape)}: align them")
