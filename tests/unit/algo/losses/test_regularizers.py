from __future__ import annotations

import pytest
import torch

from agentrl.algo.losses import LossConfig
from agentrl.algo.losses.regularizers import KLEstimator, kl_penalty
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
