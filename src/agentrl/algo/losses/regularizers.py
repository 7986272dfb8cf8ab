"""KL penalty against the reference model and entropy bonus, with the weights of the policy term."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from agentrl.algo.losses.interface import LossInputs, Tokens, clamp_log_ratio, select
from agentrl.config.sections import LossConfig

KLEstimator = Literal["k1", "k2", "k3", "k3_plus"]


def kl_penalty(policy_N: Tensor, reference_N: Tensor, *, estimator: KLEstimator) -> Tensor:
    """Per-token estimate of KL(policy || reference) from tokens the policy sampled; d = log policy - log reference.

    k1        d                   as a loss its expected gradient is zero: for monitoring
    k2        d^2 / 2             on-policy expected gradient is that of the KL
    k3        exp(-d) + d - 1     unbiased and never negative; gradient of the reverse direction
    k3_plus   value of k3, gradient of k2
    """
    log_ratio_N = policy_N - reference_N.detach()
    if estimator == "k1":
        return log_ratio_N
    if estimator == "k2":
        return 0.5 * log_ratio_N.square()
    clamped_N = clamp_log_ratio(log_ratio_N)
    k3_N = (-clamped_N).exp() + clamped_N - 1.0
    if estimator == "k3":
        return k3_N
    k2_N = 0.5 * log_ratio_N.square()
    return k2_N + (k3_N - k2_N).detach()


def with_kl_in_reward(tokens: Tokens, inputs: LossInputs, config: LossConfig) -> Tokens:
    """The tokens with advantages lowered by kl_coef x the KL from there to the end of the sequence (`kl_in_reward`).

        A'[t] = A[t] - kl_coef * sum over u >= t of kl(old[u], reference[u])      no gradient

    With k1 its expected gradient is that of - kl_coef x KL(policy || reference) of the sequence: a penalty at a token
    is credited to everything sampled up to it. No baseline is subtracted. Applied after `adv_scaling`.
    """
    if not config.kl_in_reward or inputs.reference_logprobs is None:
        return tokens
    reference_N = select(inputs.reference_logprobs.detach(), tokens.mask_N, dtype=tokens.old_N.dtype)
    kl_N = kl_penalty(tokens.old_N, reference_N, estimator=config.kl_estimator)
    to_go_N = sum_to_end(kl_N, tokens.sequences_N, num_sequences=tokens.num_sequences)
    lowered_N = tokens.advantages_N - config.kl_coef * to_go_N
    return replace(tokens, advantages_N=torch.where(tokens.mask_N, lowered_N, 0.0))


def sum_to_end(values_N: Tensor, sequences_N: Tensor, *, num_sequences: int) -> Tensor:
    """Sum from each token to the last of its sequence, itself included; tokens of a sequence are in order."""
    order_N = torch.argsort(sequences_N, stable=True)
    sums_N = values_N[order_N].cumsum(0)
    lengths_B = torch.bincount(sequences_N, minlength=num_sequences)
    totals_B = torch.cat([sums_N.new_zeros(1), sums_N])[lengths_B.cumsum(0)]
    sorted_N = totals_B[sequences_N[order_N]] - sums_N + values_N[order_N]
    return torch.empty_like(values_N).index_copy(0, order_N, sorted_N)
