import pytest
import torch
from torch import nn

from agentrl.config.sections import TrainConfig
from agentrl.train.optimizer import build_optimizer, clip_gradients, learning_rate_at, set_learning_rate


def test_warm_up_is_linear_and_reaches_the_peak_at_its_last_step() -> None:
    config = TrainConfig(learning_rate=1.0, warmup_steps=4, max_steps=10)

    assert [learning_rate_at(step, config) for step in range(1, 7)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("kind", "expected"), [("linear", [1.0, 0.75, 0.5, 0.25]), ("cosine", [1.0, 0.8535534, 0.5, 0.1464466])]
)
def test_decay_starts_at_the_peak_and_the_last_step_still_learns(kind: str, expected: list[float]) -> None:
    config = TrainConfig(learning_rate=1.0, max_steps=4, lr_scheduler_type=kind)

    assert [learning_rate_at(step, config) for step in range(1, 5)] == pytest.approx(expected)
    assert learning_rate_at(5, config) == pytest.approx(0.0)


def test_norms_and_biases_are_not_decayed() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    optimizer = build_optimizer(model, TrainConfig(weight_decay=0.1))
    set_learning_rate(optimizer, 0.5)

    decayed, plain = optimizer.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert [tuple(p.shape) for p in decayed["params"]] == [(2, 3)]
    assert [tuple(p.shape) for p in plain["params"]] == [(2,), (2,), (2,)]
    assert {group["lr"] for group in optimizer.param_groups} == {0.5}


def test_clipping_returns_the_norm_before_and_bounds_the_norm_after() -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])

    assert clip_gradients(parameters, max_norm=1.0) == pytest.approx(5.0)
    assert clip_gradients(parameters, max_norm=1.0) == pytest.approx(1.0, abs=1e-5)
