from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algo.losses import LossConfig, LossInputs, LossOutputs, build_loss
from agentrl.algo.losses.regularizers import KLEstimator, kl_penalty, sum_to_end
from golden_losses import DTYPES, Golden

CASES: dict[str, KLEstimator] = {
    "kl_k1_token_mean": "k1",
    "kl_k3_token_mean": "k3",
    "kl_k3_plus_straight_through": "k3_plus",
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "estimator"), CASES.items())
def test_golden_kl_values_and_gradients_are_reproduced(name: str, estimator: KLEstimator, dtype: torch.dtype) -> None:
    golden = Golden(name, dtype)
    policy = golden.flat("log_probs").requires_grad_()
    kl = torch.where(golden.mask, kl_penalty(policy, golden.flat("ref_log_probs"), estimator=estimator), 0.0)
    loss = (golden.weights(LossConfig()).to(dtype) * kl).sum()
    loss.backward()
    golden.close(loss, "loss")
    assert policy.grad is not None
    golden.close(policy.grad, "grad_log_probs")
    if "per_token_kl" in golden.expected:
        golden.close(kl, "per_token_kl")


@pytest.mark.parametrize(("estimator", "gradient"), [("k1", 1.0), ("k2", 0.5), ("k3", 0.393469340), ("k3_plus", 0.5)])
def test_gradients_have_their_closed_form(estimator: KLEstimator, gradient: float) -> None:
    policy = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    kl_penalty(policy, torch.tensor([-1.5], dtype=torch.float64), estimator=estimator).sum().backward()
    assert policy.grad is not None
    assert policy.grad.item() == pytest.approx(gradient, abs=1e-9)  # d = 0.5; k3: 1 - exp(-d)


def test_k3_matches_the_worked_example_and_stays_finite() -> None:
    policy = torch.tensor([-1.0, -2.0, -200.0], dtype=torch.float64, requires_grad=True)
    kl = kl_penalty(policy, torch.tensor([-1.5, -1.0, -1.0], dtype=torch.float64), estimator="k3")
    assert kl[:2].tolist() == pytest.approx([0.106531, 0.718282], abs=1e-6)
    kl.sum().backward()
    assert torch.isfinite(kl).all()
    assert policy.grad is not None
    assert policy.grad[2] == 0.0  # beyond the clamp


@given(ids=st.lists(st.integers(min_value=0, max_value=4), min_size=1, max_size=20))
def test_sums_to_the_end_stay_within_a_sequence_however_its_tokens_are_mixed(ids: list[int]) -> None:
    values = torch.arange(1.0, len(ids) + 1, dtype=torch.float64)
    unique, sequences = torch.unique(torch.tensor(ids), return_inverse=True)
    expected = [sum(values[u].item() for u in range(t, len(ids)) if ids[u] == ids[t]) for t in range(len(ids))]
    assert sum_to_end(values, sequences, num_sequences=unique.numel()).tolist() == pytest.approx(expected)


def reinforce(**settings: object) -> tuple[LossOutputs, torch.Tensor]:
    policy = torch.tensor([-1.0, -0.5, -9.0, -2.0, -1.0], dtype=torch.float64, requires_grad=True)
    outputs = build_loss(LossConfig(loss="REINFORCE", **settings))(  # type: ignore[arg-type]
        LossInputs(
            policy_logprobs=policy,
            advantages=torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0], dtype=torch.float64),
            mask=torch.tensor([True, True, False, True, True]),
            sequence_ids=torch.tensor([0, 0, 0, 0, 1]),
            weights=torch.ones(5, dtype=torch.float64),
            reference_logprobs=torch.tensor([-1.5, -0.5, 0.0, -1.0, -3.0], dtype=torch.float64),
        )
    )
    outputs.loss.backward()
    assert policy.grad is not None
    return outputs, policy.grad


def test_kl_in_reward_lowers_advantages_by_the_penalty_still_to_come() -> None:
    # d = log old - log reference = 0.5, 0, (masked), -1 | 2; to go: -0.5, -1, -, -1 | 2
    outputs, gradient = reinforce(kl_coef=0.1, kl_estimator="k1", kl_in_reward=True)
    assert gradient.tolist() == pytest.approx([-1.05, -1.1, 0.0, -1.1, 1.2])
    assert "kl_loss" not in outputs.metrics
    assert outputs.metrics["kl_mean"] == pytest.approx(1.5)  # still reported, as a sum of weight x value


def test_kl_in_reward_is_not_scaled_with_the_advantages() -> None:
    _, gradient = reinforce(kl_coef=0.1, kl_estimator="k1", kl_in_reward=True, adv_scaling=2.0)
    assert gradient.tolist() == pytest.approx([-2.05, -2.1, 0.0, -2.1, 2.2])


def test_the_expected_gradient_of_k1_in_the_reward_is_that_of_the_kl() -> None:
    logits = torch.tensor([0.3, -0.2, 1.0, 0.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.4, 0.2, -0.3], dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    outputs = build_loss(LossConfig(loss="REINFORCE", kl_coef=0.5, kl_estimator="k1", kl_in_reward=True))(
        LossInputs(
            policy_logprobs=policy,
            advantages=torch.zeros(4, dtype=torch.float64),
            mask=torch.ones(4, dtype=torch.bool),
            sequence_ids=torch.arange(4),  # every token of the vocabulary once, weighted by its probability
            weights=policy.detach().exp(),
            reference_logprobs=reference,
        )
    )
    (found,) = torch.autograd.grad(outputs.loss, logits, retain_graph=True)
    (wanted,) = torch.autograd.grad(0.5 * (policy.exp() * (policy - reference)).sum(), logits)
    assert found.tolist() == pytest.approx(wanted.tolist(), abs=1e-12)
