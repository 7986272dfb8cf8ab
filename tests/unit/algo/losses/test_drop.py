"""AgentRL's drop mask. Its sampler's log-probs are the old ones there, and denominators count what is left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from agentrl.algo.losses import LossConfig, LossInputs, build_loss
from agentrl.config.legacy import LegacyLossFlags, loss_from_legacy_flags
from golden_losses import DTYPES, Golden, golden_file

FLAGS = {
    "loss_calculater",
    "epsilon",
    "epsilon_higher",
    "strict_in_bound",
    "importance_weight_cap_ratio",
    "out_of_date_decay",
    "token_level_loss",
    "skip_length_normalization",
    "beta1",
    "beta2",
}
CASES = [
    "agentrl_minirl_example_config",
    "agentrl_minirl_strict_length_norm",
    "agentrl_minirl_strict_token_level",
    "agentrl_grpo_example_config",
]
# Clipped tokens get no gradient at all there; here beta1 and beta2 do what the paper says.
NOT_EXPRESSED = {"agentrl_ce_grpo_b1_075_b2_1"}


def agentrl_config(golden: Golden) -> LossConfig:
    flags = LegacyLossFlags(**{name: value for name, value in golden.options.items() if name in FLAGS})
    config = loss_from_legacy_flags(flags)
    # With several rows per rank AgentRL's token level is a mean over rows of token means.
    return config.model_copy(
        update={"aggregation": "seq_mean_token_mean"} if config.aggregation == "token_mean" else {}
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_golden_loss_gradient_and_kept_tokens_are_reproduced(name: str, dtype: torch.dtype) -> None:
    golden = Golden(name, dtype)
    config = agentrl_config(golden)
    inputs = golden.inputs(config, old_logprobs=golden.flat("rollout_log_probs"))
    first = build_loss(config)(inputs)
    kept = (first.factors > 0) & ~first.clipped if config.loss == "MINIRL" else first.factors > 0
    golden.close(kept.to(dtype), "kept_mask")
    outputs = build_loss(config)(replace(inputs, weights=golden.weights(config, counted=kept)))
    outputs.loss.backward()
    golden.close(outputs.loss, "loss")
    assert inputs.policy_logprobs.grad is not None
    golden.close(inputs.policy_logprobs.grad, "grad_log_probs")


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_ranks_with_a_row_each_pool_their_tokens(dtype: torch.dtype) -> None:
    golden = Golden("agentrl_token_level_two_ranks_b1", dtype)
    config = LossConfig(importance_weight_cap_ratio=4.0)
    rows = torch.isin(golden.sequence_ids, torch.tensor(golden.options["rows"]))
    golden.mask = golden.mask & rows
    inputs = golden.inputs(config, old_logprobs=golden.flat("rollout_log_probs"))
    kept = build_loss(config)(inputs).factors > 0
    outputs = build_loss(config)(replace(inputs, weights=golden.weights(config, counted=kept)))
    outputs.loss.backward()
    golden.close(outputs.loss, "loss_every_rank")
    assert inputs.policy_logprobs.grad is not None
    golden.close(inputs.policy_logprobs.grad[rows], "grad_after_fsdp_mean")
    golden.close(kept[rows].to(dtype), "kept_mask")


def test_every_agentrl_case_of_the_file_is_accounted_for() -> None:
    names = {case["name"] for case in golden_file()["cases"] if case["family"] == "agentrl"}
    assert names == {*CASES, *NOT_EXPRESSED}


def dropped(config: LossConfig, *, ratios: list[float], advantages: list[float], staleness: int = 0) -> list[bool]:
    old = torch.full((len(ratios),), -1.0, dtype=torch.float64)
    ones = torch.ones(len(ratios), dtype=torch.bool)
    inputs = LossInputs(
        policy_logprobs=(old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_(),
        advantages=torch.tensor(advantages),
        mask=ones,
        sequence_ids=torch.zeros(len(ratios), dtype=torch.int64),
        weights=ones.double() / len(ratios),
        old_logprobs=old,
        policy_versions=torch.full((len(ratios),), 7 - staleness),
        current_version=7,
    )
    outputs = build_loss(config)(inputs)
    outputs.loss.backward()
    assert inputs.policy_logprobs.grad is not None
    is_dropped = outputs.factors == 0
    assert (inputs.policy_logprobs.grad[is_dropped] == 0).all()
    assert outputs.metrics["drop_fraction"] == pytest.approx(is_dropped.double().mean().item())
    return is_dropped.tolist()


# epsilon 0.2, epsilon_higher 0.1, R = 4: kept in [0.2, 2.2]
@pytest.mark.parametrize(
    ("settings", "staleness", "expected"),
    [
        # ratio             2.3    2.1    0.1    0.3    0.1
        # advantage         +      +      -      -      +
        ({}, 0, [True, False, True, False, False]),
        ({"strict_in_bound": True}, 0, [True, True, True, True, False]),
        ({"out_of_date_decay": 0.7}, 0, [True, False, True, False, False]),
        ({"out_of_date_decay": 0.7}, 1, [True, True, True, True, False]),
    ],
)
def test_tokens_beyond_the_bounds_leave_the_loss_by_the_sign_of_their_advantage(
    settings: dict[str, Any], staleness: int, expected: list[bool]
) -> None:
    config = LossConfig(loss="REINFORCE", importance_weight_cap_ratio=4.0, **settings)
    ratios, advantages = [2.3, 2.1, 0.1, 0.3, 0.1], [1.0, 1.0, -1.0, -1.0, 1.0]
    assert dropped(config, ratios=ratios, advantages=advantages, staleness=staleness) == expected


def test_without_the_setting_nothing_is_dropped() -> None:
    assert dropped(LossConfig(), ratios=[50.0, 0.01], advantages=[1.0, -1.0]) == [False, False]
