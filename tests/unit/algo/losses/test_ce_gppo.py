from __future__ import annotations

import pytest

from agentrl.algo.losses import LossConfig
from losses_by_hand import by_hand


def test_clipped_tokens_keep_beta_times_the_bound_as_gradient() -> None:
    config = LossConfig(loss="CE_GPPO", epsilon=0.2, epsilon_higher=0.1, beta1=0.75, beta2=0.5)
    outputs, gradient = by_hand(config, ratios=[0.5, 1.5, 1.1, 0.5], advantages=[-1.0, 2.0, 1.0, 1.0])
    assert gradient == pytest.approx([0.75 * 0.8, -0.5 * 1.3 * 2.0, -1.1, -0.5])
    assert outputs.clipped.tolist() == [True, True, False, False]


def test_betas_left_out_are_those_of_the_paper() -> None:
    config = LossConfig(loss="CE_GPPO", epsilon=0.2, epsilon_higher=0.0)
    _, gradient = by_hand(config, ratios=[0.5, 1.5], advantages=[-1.0, 1.0])
    assert gradient == pytest.approx([0.75 * 0.8, -1.2])


def test_dual_clip_bounds_the_loss_of_negative_advantages() -> None:
    outputs, gradient = by_hand(LossConfig(loss="CE_GPPO", dual_clip=3.0), ratios=[4.0], advantages=[-1.0])
    assert outputs.loss.item() == pytest.approx(3.0)
    assert gradient == [0.0]
