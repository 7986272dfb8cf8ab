"""One loss from its parts.

    LossInputs -> clean_tokens -> KL in reward -> policy term (registry) -> drop mask -> rollout correction
               -> sum of weight x loss + kl_coef x KL to the reference - entropy_coef x entropy

Each part is a file of this package; none knows the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algo.losses.correction import RolloutWeights, rollout_weights
from agentrl.algo.losses.drop import within_drop_bounds
from agentrl.algo.losses.interface import (
    LossInputs,
    LossOutputs,
    Tokens,
    TokenTerms,
    check_inputs,
    clamp_log_ratio,
    clean_tokens,
    select,
)
from agentrl.algo.losses.metrics import read_metrics
from agentrl.algo.losses.registry import policy_term
from agentrl.algo.losses.regularizers import kl_penalty, with_kl_in_reward
from agentrl.config.sections import LossConfig

Loss = Callable[[LossInputs], LossOutputs]


def build_loss(config: LossConfig) -> Loss:
    """The loss function of a run. Pure: no collective, no state; split a step as you like and add the parts.

    The result always has a graph to `policy_logprobs`, also when every token is masked, so backward always runs.
    The function raises ConfigError if a tensor the configuration needs is missing, ValueError for misaligned shapes.
    """
    find_terms = policy_term(config)

    def loss(inputs: LossInputs) -> LossOutputs:
        check_inputs(inputs, config)
        tokens = with_kl_in_reward(clean_tokens(inputs, config), inputs, config)
        terms = find_terms(tokens, config)
        selection = _select_tokens(inputs, config, tokens=tokens, terms=terms)
        weights_N = select(inputs.weights, tokens.mask_N, dtype=tokens.policy_N.dtype)
        token_losses_N = torch.where(tokens.mask_N, terms.losses_N, 0.0)
        sums = _policy_sums(tokens, terms, weights_N=weights_N, selection=selection)
        total = sums["policy_loss"] = (weights_N * selection.factors_N * token_losses_N).sum()
        for name, term in _regularizers(inputs, config, tokens=tokens, weights_N=weights_N, sums=sums).items():
            sums[name] = term
            total = total + term
        sums["loss"] = total
        return LossOutputs(
            loss=total,
            token_losses=token_losses_N,
            metrics=read_metrics(sums, ratios_N=torch.where(tokens.mask_N, terms.ratios_N, 0.0)),
            ratios=terms.ratios_N,
            clipped=tokens.mask_N & (terms.clipped_low_N | terms.clipped_high_N),
            factors=selection.factors_N,
        )

    return loss


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Selection:
    """Which tokens train and how much."""

    factors_N: Tensor  # no gradient; 0 where masked, dropped or rejected
    dropped_N: Tensor
    correction: RolloutWeights | None


def _select_tokens(inputs: LossInputs, config: LossConfig, *, tokens: Tokens, terms: TokenTerms) -> _Selection:
    kept_N = tokens.mask_N
    inside_N = within_drop_bounds(inputs, config, ratios_N=terms.ratios_N, advantages_N=tokens.advantages_N)
    if inside_N is not None:
        kept_N = kept_N & inside_N
    dropped_N = tokens.mask_N & ~kept_N
    if config.rollout_correction == "none" or tokens.behaviour_N is None:
        return _Selection(factors_N=kept_N.to(tokens.old_N.dtype), dropped_N=dropped_N, correction=None)
    correction = rollout_weights(
        config,
        old_logprobs=tokens.old_N,
        behaviour_logprobs=tokens.behaviour_N,
        mask=tokens.mask_N,
        sequence_ids=tokens.sequences_N,
        mean_weight=inputs.mean_rollout_weight if config.rollout_correction_normalize else None,
    )
    return _Selection(
        factors_N=torch.where(kept_N, correction.weights_N, 0.0),
        dropped_N=dropped_N,
        correction=correction,
    )


def _policy_sums(tokens: Tokens, terms: TokenTerms, *, weights_N: Tensor, selection: _Selection) -> dict[str, Tensor]:
    def total(values_N: Tensor) -> Tensor:
        return (weights_N * values_N.detach().to(weights_N.dtype)).sum()

    log_ratio_N = tokens.log_ratio_N.detach()
    sums = {
        "weight_total": weights_N.sum(),
        "advantage_mean": total(tokens.advantages_N),
        "ratio_mean": total(terms.ratios_N),
        "approx_kl": total(log_ratio_N.exp() - 1.0 - log_ratio_N),
        "clip_fraction_low": total(terms.clipped_low_N),
        "clip_fraction_high": total(terms.clipped_high_N),
        "drop_fraction": total(selection.dropped_N),
    }
    if tokens.behaviour_N is not None:
        log_k_N = clamp_log_ratio(tokens.old_N - tokens.behaviour_N)
        sums["mismatch_kl"] = total(log_k_N.exp() - 1.0 - log_k_N)
    if selection.correction is not None:
        sums["reject_fraction"] = total(tokens.mask_N & ~selection.correction.kept_N)
        sums["correction_weight_mean"] = total(selection.correction.weights_N)
    return sums


def _regularizers(
    inputs: LossInputs, config: LossConfig, *, tokens: Tokens, weights_N: Tensor, sums: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Terms to add to the loss; their plain means go into `sums` wherever the tensors are there."""
    dtype = tokens.policy_N.dtype
    added: dict[str, Tensor] = {}
    if inputs.reference_logprobs is not None:
        reference_N = select(inputs.reference_logprobs, tokens.mask_N, dtype=dtype)
        kl = (weights_N * kl_penalty(tokens.policy_N, reference_N, estimator=config.kl_estimator)).sum()
        sums["kl_mean"] = kl
        if config.kl_coef > 0 and not config.kl_in_reward:
            added["kl_loss"] = config.kl_coef * kl
    if inputs.entropy is not None:
        entropy = (weights_N * select(inputs.entropy, tokens.mask_N, dtype=dtype)).sum()
        sums["entropy"] = entropy
        if config.entropy_coef > 0:
            added["entropy_loss"] = -config.entropy_coef * entropy
    return added
