"""KL penalty against the reference model and entropy bonus, with the weights of the policy term."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from agentrl.algo.losses.interface import clamp_log_ratio

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
