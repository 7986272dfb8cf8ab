from __future__ import annotations

import pytest

from agentrl.algo.losses import LossConfig
from losses_by_hand import by_hand


def test_the_gradient_is_the_advantage_whatever_the_ratio() -> None:
    outputs, gradient = by_hand(LossConfig(loss="REINFORCE"), ratios=[1.0, 7.0], advantages=[0.5, -2.0])
    assert gradient == pytest.approx([-0.5, 2.0])
    assert outputs.metrics["ratio_max"] == pytest.approx(7.0)


def test_a_correction_weighs_it_by_policy_over_behaviour() -> None:
    config = LossConfig(loss="REINFORCE", rollout_correction="tis", rollout_correction_high=2.0)
    _, gradient = by_hand(config, ratios=[1.0, 1.0], advantages=[1.0, 1.0], mismatch=[1.5, 9.0])
    assert gradient == pytest.approx([-1.5, -2.0])
