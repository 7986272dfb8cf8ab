from __future__ import annotations

import math

import pytest
import torch

from agentrl.algo.losses import LossConfig, LossInputs, build_loss, combine_metrics

#                      in   high  low   in
RATIOS = torch.tensor([1.0, 1.5, 0.5, 1.1], dtype=torch.float64)
ADVANTAGES = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)


def metrics(config: LossConfig, *, weight: float = 0.25) -> dict[str, float]:
    old = torch.full((4,), -2.0, dtype=torch.float64)
    inputs = LossInputs(
        policy_logprobs=(old + RATIOS.log()).requires_grad_(),
        advantages=ADVANTAGES,
        mask=torch.ones(4, dtype=torch.bool),
        sequence_ids=torch.zeros(4, dtype=torch.int64),
        weights=torch.full((4,), weight),
        old_logprobs=old,
        behaviour_logprobs=old - math.log(3.0),  # k = 3
        reference_logprobs=old,
        entropy=torch.full((4,), 0.7, dtype=torch.float64),
    )
    return build_loss(config)(inputs).metrics


def test_fractions_and_means_are_over_trained_tokens() -> None:
    values = metrics(LossConfig(rollout_correction="icepop", rollout_correction_high=2.0, kl_coef=0.5))
    k3 = [math.exp(-d) + d - 1 for d in RATIOS.log().tolist()]
    expected = {
        "clip_fraction_low": 0.25,
        "clip_fraction_high": 0.25,
        "ratio_mean": 4.1 / 4,
        "ratio_max": 1.5,
        "approx_kl": sum(r - 1 - math.log(r) for r in RATIOS.tolist()) / 4,
        "reject_fraction": 1.0,
        "correction_weight_mean": 0.0,
        "mismatch_kl": 3 - 1 - math.log(3),
        "kl_mean": sum(k3) / 4,
        "kl_loss": 0.5 * sum(k3) / 4,
        "entropy": 0.7,
        "policy_loss": 0.0,
        "loss": 0.5 * sum(k3) / 4,
        "weight_total": 1.0,
        "advantage_mean": 0.0,
        "drop_fraction": 0.0,
    }
    assert values == pytest.approx(expected)


def test_combining_divides_means_by_the_weights_and_keeps_sums() -> None:
    whole = metrics(LossConfig())
    doubled = combine_metrics([metrics(LossConfig(), weight=0.5), metrics(LossConfig(), weight=1.5)])
    assert doubled["ratio_mean"] == pytest.approx(whole["ratio_mean"])
    assert doubled["clip_fraction_high"] == pytest.approx(whole["clip_fraction_high"])
    assert doubled["ratio_max"] == whole["ratio_max"]
    assert doubled["loss"] == pytest.approx(8 * whole["loss"])
    assert doubled["weight_total"] == pytest.approx(8.0)


def test_a_step_without_weights_has_zero_means() -> None:
    assert combine_metrics([{"ratio_mean": 0.0, "weight_total": 0.0}]) == {"ratio_mean": 0.0, "weight_total": 0.0}
