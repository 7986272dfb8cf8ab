from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.algo.losses import LossConfig, RolloutWeights, rollout_weights
from golden_losses import DTYPES, Golden, golden_file

CASES: dict[str, dict[str, Any]] = {
    "tis_token_c2": {"rollout_correction": "tis"},
    "mis_token_05_2": {
        "rollout_correction": "mis",
        "rollout_correction_low": 0.5,
        "rollout_correction_high": 2.0,
    },
    "mis_sequence_max3": {"rollout_correction": "mis", "rollout_correction_level": "sequence"},
    "mis_geometric_099_101": {"rollout_correction": "geometric"},
    "icepop_05_5": {"rollout_correction": "icepop"},
}


def golden_weights(golden: Golden, config: LossConfig, *, mean_weight: float | None = None) -> RolloutWeights:
    return rollout_weights(
        config,
        old_logprobs=golden.flat("old_log_probs"),
        behaviour_logprobs=golden.flat("rollout_log_probs"),
        mask=golden.mask,
        sequence_ids=golden.sequence_ids,
        mean_weight=mean_weight,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_golden_weights_and_kept_tokens_are_reproduced(name: str, dtype: torch.dtype) -> None:
    golden = Golden(name, dtype)
    result = golden_weights(golden, LossConfig(**CASES[name]))
    golden.close(result.weights_N, "weights")
    golden.close(result.kept_N.to(dtype), "kept_mask")


@pytest.mark.parametrize("dtype", DTYPES)
def test_normalised_weights_have_mean_one_over_the_step(dtype: torch.dtype) -> None:
    golden = Golden("tis_token_c2_batch_normalized", dtype)
    config = LossConfig(rollout_correction="tis", rollout_correction_normalize=True)
    mean = golden_weights(golden, config).weights_N[golden.mask].mean().item()
    golden.close(golden_weights(golden, config, mean_weight=mean).weights_N, "weights")


def test_every_correction_case_of_the_file_is_covered() -> None:
    names = {case["name"] for case in golden_file()["cases"] if case["family"] == "rollout_correction"}
    assert names == CASES.keys() | {"tis_token_c2_batch_normalized"}


# two sequences of two tokens; log k = old - behaviour:  a: 0, log 4 | b: log 0.5, log 0.5
OLD = torch.tensor([-1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
K = torch.tensor([1.0, 4.0, 0.5, 0.5], dtype=torch.float64)
IDS = torch.tensor([10, 10, 3, 3])


def weigh(k: Tensor = K, **settings: Any) -> RolloutWeights:
    mask = torch.ones(k.numel(), dtype=torch.bool)
    return rollout_weights(
        LossConfig(**settings), old_logprobs=OLD, behaviour_logprobs=OLD - k.log(), mask=mask, sequence_ids=IDS
    )


def test_sequence_level_takes_the_product_over_the_sequence() -> None:
    weights = weigh(rollout_correction="tis", rollout_correction_level="sequence", rollout_correction_high=3.0)
    torch.testing.assert_close(weights.weights_N, torch.tensor([3.0, 3.0, 0.25, 0.25], dtype=torch.float64))


def test_a_lower_bound_turns_truncation_into_a_two_sided_clip() -> None:
    weights = weigh(rollout_correction="tis", rollout_correction_low=0.8)
    torch.testing.assert_close(weights.weights_N, torch.tensor([1.0, 2.0, 0.8, 0.8], dtype=torch.float64))


def test_geometric_keeps_a_sequence_by_its_mean_and_does_not_weigh_it() -> None:
    weights = weigh(rollout_correction="geometric", rollout_correction_low=0.9, rollout_correction_high=2.5)
    assert weights.weights_N.tolist() == [1.0, 1.0, 0.0, 0.0]


def test_one_bad_token_vetoes_its_whole_sequence() -> None:
    weights = weigh(rollout_correction="veto", rollout_correction_low=0.6, rollout_correction_high=10.0)
    assert weights.kept_N.tolist() == [True, True, False, False]
    upper = weigh(rollout_correction="veto", rollout_correction_high=3.0)
    assert upper.kept_N.tolist() == [False, False, True, True]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"rollout_correction": "tis"}, [True, False, True, True]),
        ({"rollout_correction": "tis", "rollout_correction_level": "sequence"}, [False, False, True, True]),
        ({"rollout_correction": "veto"}, [False, False, True, True]),
    ],
)
def test_an_impossible_behaviour_logprob_rejects_its_token_or_sequence(
    settings: dict[str, Any], kept: list[bool]
) -> None:
    impossible = torch.tensor([1.0, float("inf"), 0.5, 0.5], dtype=torch.float64)  # k = inf: behaviour log-prob -inf
    result = weigh(impossible, **settings)
    assert result.kept_N.tolist() == kept
    assert torch.isfinite(result.weights_N).all()


def test_weights_carry_no_gradient() -> None:
    old = OLD.clone().requires_grad_()
    result = rollout_weights(
        LossConfig(rollout_correction="tis"),
        old_logprobs=old,
        behaviour_logprobs=OLD - K.log(),
        mask=torch.ones(4, dtype=torch.bool),
        sequence_ids=IDS,
    )
    assert not result.weights_N.requires_grad
