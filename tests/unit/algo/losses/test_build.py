"""The golden cases of every loss, and the properties all losses share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from agentrl.algo.losses import LossConfig, LossInputs, LossOutputs, build_loss, combine_metrics, token_weights
from agentrl.errors import ConfigError
from golden_losses import DTYPES, golden_file, run_golden

CLIP_02 = {"epsilon": 0.2, "epsilon_higher": 0.0}
CLIP_028 = {"epsilon": 0.2, "epsilon_higher": 0.08}
MINIRL = {"loss": "MINIRL", "epsilon": 0.2, "epsilon_higher": 0.07, "aggregation": "seq_mean_token_sum"}
GSPO = {"loss": "GSPO", "epsilon": 3e-4, "epsilon_higher": 1e-4, "aggregation": "seq_mean_token_mean"}

RECOMMENDED: dict[str, dict[str, Any]] = {
    "grpo_token_mean": CLIP_02,
    "dapo_clip_higher": CLIP_028,
    "dapo_clip_higher_dual_clip_c3": CLIP_028 | {"dual_clip": 3.0},
    "grpo_zero_advantage": CLIP_028 | {"dual_clip": 3.0},
    "grpo_all_rows_masked": CLIP_02,
    "grpo_overflow_clamp20_dual_clip": CLIP_028 | {"dual_clip": 3.0},
    "gspo_near": GSPO,
    "gspo_token_near": GSPO,
    "cispo_upper_only": {"loss": "CISPO", "cispo_clip_low": 0.0, "cispo_clip_high": 1.28},
    "minirl_paper": MINIRL | {"is_cap": 5.0},
    "minirl_paper_no_cap": MINIRL,
    "ce_gppo_b1_075_b2_1": CLIP_02 | {"loss": "CE_GPPO", "beta1": 0.75, "beta2": 1.0},
    "ce_gppo_b1_0_b2_0_equals_ppo_grad": CLIP_02 | {"loss": "CE_GPPO", "beta1": 0.0, "beta2": 0.0},
    "grpo_token_mean_tis_token_c2": CLIP_028 | {"rollout_correction": "tis", "rollout_correction_high": 2.0},
    "icepop_token_mean": CLIP_028 | {"rollout_correction": "icepop"},
    "reinforce_token_mean": {"loss": "REINFORCE"},
    "grpo_token_mean_plus_k3_beta005": CLIP_02 | {"kl_coef": 0.05, "kl_estimator": "k3"},
}
WITHOUT_OLD: dict[str, dict[str, Any]] = {
    "grpo_old_logprobs_missing": CLIP_02,
    "minirl_on_policy": MINIRL | {"is_cap": 5.0},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RECOMMENDED)
def test_golden_loss_and_gradient_are_reproduced(name: str, dtype: torch.dtype) -> None:
    run_golden(name, LossConfig(**RECOMMENDED[name]), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WITHOUT_OLD)
def test_missing_old_logprobs_are_the_policy_itself(name: str, dtype: torch.dtype) -> None:
    run_golden(name, LossConfig(**WITHOUT_OLD[name]), dtype=dtype, old_logprobs=None)


def test_every_recommended_loss_case_of_the_file_is_covered() -> None:
    elsewhere = {"kl", "rollout_correction", "advantages", "aggregation", "agentrl"}  # their own test files
    names = {case["name"] for case in golden_file()["cases"] if case["family"] not in elsewhere}
    assert names <= RECOMMENDED.keys() | WITHOUT_OLD.keys()


# ---- properties of all losses ------------------------------------------------------------------------------------

EVERY_LOSS: dict[str, dict[str, Any]] = {
    "GRPO": {},
    "GRPO dual clip, KL, entropy": {"dual_clip": 2.0, "kl_coef": 0.1, "entropy_coef": 0.01},
    "GRPO KL in reward": {"kl_coef": 0.1, "kl_estimator": "k1", "kl_in_reward": True},
    "GRPO drop mask": {"importance_weight_cap_ratio": 1.5, "out_of_date_decay": 0.3},
    "GRPO icepop": {"rollout_correction": "icepop"},
    "GRPO sequence tis": {"rollout_correction": "tis", "rollout_correction_level": "sequence"},
    "GRPO veto": {"rollout_correction": "veto", "rollout_correction_low": 0.4},
    "GSPO": {"loss": "GSPO", "epsilon": 0.05, "epsilon_higher": 0.02},
    "MINIRL": {"loss": "MINIRL", "is_cap": 5.0},
    "MINIRL strict": {"loss": "MINIRL", "strict_in_bound": True},
    "CISPO": {"loss": "CISPO", "cispo_clip_low": 0.5, "cispo_clip_high": 1.5},
    "CE_GPPO": {"loss": "CE_GPPO"},
    "REINFORCE": {"loss": "REINFORCE"},
    "CROSS_ENTROPY": {"loss": "CROSS_ENTROPY"},
}
AGGREGATIONS: dict[str, dict[str, Any]] = {
    "token_mean": {},
    "seq_mean_token_mean": {},
    "seq_mean_token_sum": {},
    "constant": {"constant_length": 7},
}
every_loss = pytest.mark.parametrize("settings", EVERY_LOSS.values(), ids=EVERY_LOSS.keys())


@dataclass(frozen=True)
class Step:
    """The tokens of one optimizer step: rows of uneven length, masks with holes, some rows fully masked."""

    tensors: dict[str, Tensor]
    num_rows: int

    def micro_batch(self, rows: Sequence[int], weights: Tensor, **replaced: Any) -> LossInputs:
        chosen = torch.isin(self.tensors["sequence_ids"], torch.tensor(rows, dtype=torch.int64))
        parts = {name: tensor[chosen].detach().clone() for name, tensor in self.tensors.items()}
        parts |= replaced
        parts["policy_logprobs"].requires_grad_()
        parts["entropy"].requires_grad_()
        return LossInputs(**parts, weights=weights[chosen], current_version=5)


def make_step(seed: int, *, num_rows: int = 6, spread: float = 0.4) -> Step:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 7, (num_rows,), generator=generator)
    num_tokens = int(lengths.sum())

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(num_tokens, generator=generator, dtype=torch.float64)

    policy = -torch.rand(num_tokens, generator=generator, dtype=torch.float64) * 3 - 0.1
    mask = torch.rand(num_tokens, generator=generator) < 0.75
    sequence_ids = torch.arange(num_rows).repeat_interleave(lengths)
    mask &= sequence_ids != int(torch.randint(0, num_rows, (1,), generator=generator))
    tensors = {
        "policy_logprobs": policy,
        "advantages": noise(1.0),
        "mask": mask,
        "sequence_ids": sequence_ids,
        "old_logprobs": policy + noise(spread),
        "behaviour_logprobs": policy + noise(spread),
        "reference_logprobs": policy + noise(spread),
        "entropy": torch.rand(num_tokens, generator=generator, dtype=torch.float64),
        "policy_versions": torch.randint(2, 6, (num_tokens,), generator=generator),
    }
    return Step(tensors=tensors, num_rows=num_rows)


def step_weights(step: Step, config: LossConfig) -> Tensor:
    return token_weights(
        step.tensors["mask"],
        step.tensors["sequence_ids"],
        aggregation=config.aggregation,
        num_sequences=step.num_rows,
        constant_length=config.constant_length,
    )


def run(config: LossConfig, inputs: LossInputs) -> tuple[LossOutputs, Tensor]:
    outputs = build_loss(config)(inputs)
    outputs.loss.backward()
    assert inputs.policy_logprobs.grad is not None
    return outputs, inputs.policy_logprobs.grad


@every_loss
@hypothesis_settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_loss_gradient_and_metrics_do_not_depend_on_the_split(settings: dict[str, Any], data: st.DataObject) -> None:
    aggregation = data.draw(st.sampled_from(sorted(AGGREGATIONS)))
    config = LossConfig(**settings, aggregation=aggregation, **AGGREGATIONS[aggregation])
    step = make_step(data.draw(st.integers(0, 10_000)))
    weights = step_weights(step, config)
    bins = data.draw(st.lists(st.integers(0, 3), min_size=step.num_rows, max_size=step.num_rows))
    whole, whole_gradient = run(config, step.micro_batch(range(step.num_rows), weights))

    gradient = torch.zeros_like(whole_gradient)
    parts = []
    for number in range(4):  # 2 ranks x 2 micro-batches; some may be empty
        rows = [row for row, bin_number in enumerate(bins) if bin_number == number]
        outputs, part_gradient = run(config, step.micro_batch(rows, weights))
        gradient[torch.isin(step.tensors["sequence_ids"], torch.tensor(rows, dtype=torch.int64))] = part_gradient
        parts.append(outputs)

    torch.testing.assert_close(sum(part.loss for part in parts), whole.loss, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient, whole_gradient, rtol=0, atol=1e-12)
    assert combine_metrics(part.metrics for part in parts) == pytest.approx(combine_metrics([whole.metrics]), abs=1e-9)


@every_loss
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_what_lies_under_the_mask_never_reaches_loss_or_gradient(settings: dict[str, Any], poison: float) -> None:
    config = LossConfig(**settings)
    step = make_step(7)
    weights = step_weights(step, config)
    mask = step.tensors["mask"]
    clean, clean_gradient = run(config, step.micro_batch(range(step.num_rows), weights))
    floats = [name for name, tensor in step.tensors.items() if tensor.is_floating_point()]
    poisoned = {name: torch.where(mask, step.tensors[name], poison) for name in floats}
    outputs, gradient = run(config, step.micro_batch(range(step.num_rows), weights, **poisoned))

    assert (gradient[~mask] == 0).all()
    assert (clean_gradient[mask] != 0).any()
    torch.testing.assert_close(outputs.loss, clean.loss, rtol=0, atol=0)
    torch.testing.assert_close(gradient, clean_gradient, rtol=0, atol=0)
    assert outputs.metrics == clean.metrics


@every_loss
@pytest.mark.parametrize("num_rows", [0, 3])
def test_a_batch_without_trained_tokens_gives_zero_and_still_runs_backward(
    settings: dict[str, Any], num_rows: int
) -> None:
    config = LossConfig(**settings)
    step = make_step(3)
    nothing = torch.zeros_like(step.tensors["mask"])
    step = Step(tensors=step.tensors | {"mask": nothing}, num_rows=step.num_rows)
    weights = step_weights(step, config)
    outputs, gradient = run(config, step.micro_batch(range(num_rows), weights))
    assert outputs.loss.item() == 0.0
    assert (gradient == 0).all()
    assert set(outputs.metrics.values()) == {0.0}


@every_loss
def test_a_positive_advantage_raises_the_logprob(settings: dict[str, Any]) -> None:
    config = LossConfig(**settings)
    step = make_step(11, spread=0.01)
    plain = dict.fromkeys(("reference_logprobs",), step.tensors["policy_logprobs"])
    positive = step.tensors["advantages"].abs() + 0.1
    inputs = step.micro_batch(range(step.num_rows), step_weights(step, config), advantages=positive, **plain)
    outputs, gradient = run(config, inputs)
    trained = outputs.factors > 0
    assert trained.any()
    assert (gradient[trained] < 0).all()  # descent on the loss moves these log-probs up


@pytest.mark.parametrize("loss", ["GRPO", "GSPO", "MINIRL", "CISPO", "CE_GPPO"])
@given(seed=st.integers(0, 10_000))
@hypothesis_settings(max_examples=10, deadline=None)
def test_at_ratio_one_the_gradient_is_that_of_reinforce(loss: str, seed: int) -> None:
    step = make_step(seed)
    same = dict.fromkeys(("old_logprobs", "behaviour_logprobs"), step.tensors["policy_logprobs"])
    gradients = []
    for name in (loss, "REINFORCE"):
        config = LossConfig(loss=name)
        inputs = step.micro_batch(range(step.num_rows), step_weights(step, config), **same)
        gradients.append(run(config, inputs)[1])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("loss", ["GRPO", "GSPO", "MINIRL", "CISPO", "CE_GPPO", "REINFORCE"])
def test_adv_scaling_is_a_factor_on_every_advantage(loss: str) -> None:
    step = make_step(5)
    base = LossConfig(loss=loss)
    weights = step_weights(step, base)
    scaled, scaled_gradient = run(LossConfig(loss=loss, adv_scaling=2.0), step.micro_batch(range(6), weights))
    plain, gradient = run(base, step.micro_batch(range(6), weights))
    torch.testing.assert_close(scaled.loss, 2 * plain.loss)
    torch.testing.assert_close(scaled_gradient, 2 * gradient)


def test_the_gradient_is_the_derivative_of_the_loss_where_it_is_smooth() -> None:
    config = LossConfig(kl_coef=0.3, kl_estimator="k3", entropy_coef=0.2, epsilon=10.0)
    step = make_step(2)
    inputs = step.micro_batch(range(step.num_rows), step_weights(step, config))

    def total(policy: Tensor, entropy: Tensor) -> Tensor:
        return build_loss(config)(replace(inputs, policy_logprobs=policy, entropy=entropy)).loss

    assert inputs.entropy is not None
    assert torch.autograd.gradcheck(total, (inputs.policy_logprobs, inputs.entropy))


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        ({"rollout_correction": "tis"}, "behaviour_logprobs"),
        ({"kl_coef": 0.1}, "reference_logprobs"),
        ({"entropy_coef": 0.1}, "entropy"),
        ({"importance_weight_cap_ratio": 4.0, "out_of_date_decay": 0.1}, "policy_versions"),
        ({"importance_weight_cap_ratio": 4.0, "out_of_date_decay": 0.1}, "current_version"),
        ({"rollout_correction": "tis", "rollout_correction_normalize": True}, "mean_rollout_weight"),
    ],
)
def test_a_configured_term_without_its_tensor_is_refused(settings: dict[str, Any], missing: str) -> None:
    config = LossConfig(**settings)
    step = make_step(1)
    inputs = step.micro_batch(range(step.num_rows), step_weights(step, config))
    with pytest.raises(ConfigError, match=missing):
        build_loss(config)(replace(inputs, **{missing: None}))


def test_tensors_that_do_not_line_up_are_named() -> None:
    config = LossConfig()
    step = make_step(1)
    inputs = step.micro_batch(range(step.num_rows), step_weights(step, config))
    with pytest.raises(ValueError, match="old_logprobs has shape"):
        build_loss(config)(replace(inputs, old_logprobs=torch.zeros(3)))
    with pytest.raises(ValueError, match="1-D"):
        build_loss(config)(replace(inputs, policy_logprobs=torch.zeros(3, 2)))


def test_half_precision_inputs_are_reduced_in_float32() -> None:
    config = LossConfig()
    step = make_step(4)
    weights = step_weights(step, config)
    half = {"policy_logprobs": step.tensors["policy_logprobs"].bfloat16()}
    inputs = step.micro_batch(range(step.num_rows), weights, **half)
    outputs, _ = run(config, inputs)
    assert outputs.loss.dtype is torch.float32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "CISPO", "dual_clip": 3.0}, "no clipped surrogate"),
        ({"out_of_date_decay": 0.1}, "importance_weight_cap_ratio"),
        ({"rollout_correction": "icepop", "rollout_correction_level": "sequence"}, "per token"),
        ({"loss": "MINIRL", "rollout_correction": "tis"}, "is_cap"),
        ({"rollout_correction": "veto", "rollout_correction_normalize": True}, "no weights"),
        ({"is_cap": 5.0}, "is_cap = 5.0: loss = 'GRPO' does not look at it, only MINIRL"),
        ({"loss": "MINIRL", "beta1": 0.5}, "beta1 = 0.5: loss = 'MINIRL' does not look at it"),
        ({"cispo_clip_high": 2.0}, "cispo_clip_high = 2.0: loss = 'GRPO' does not"),
        ({"constant_length": 5}, "constant_length = 5: aggregation = 'token_mean' does not look at it"),
        ({"rollout_correction_high": 3.0}, "rollout_correction_high = 3.0: rollout_correction = 'none' does not"),
        ({"rollout_correction_level": "sequence"}, "rollout_correction_level = sequence: rollout_correction = 'none'"),
        ({"rollout_correction": "icepop", "rollout_correction_low": 6.0}, "would reject every token: its bounds are 6"),
    ],
)
def test_settings_without_an_effect_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossConfig(**settings)


def test_a_loss_of_the_users_own_may_look_at_any_option(tmp_path: Path) -> None:
    LossConfig(loss="MINE", loss_module=tmp_path / "mine.py", is_cap=5.0, dual_clip=3.0, cispo_clip_high=2.0)
