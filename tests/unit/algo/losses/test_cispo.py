from __future__ import annotations

import pytest

from agentrl.algo.losses import LossConfig
from losses_by_hand import by_hand


def test_the_weight_is_capped_and_every_token_keeps_a_gradient() -> None:
    config = LossConfig(loss="CISPO", cispo_clip_low=0.5, cispo_clip_high=2.0)
    outputs, gradient = by_hand(config, ratios=[9.0, 0.1, 1.5, 9.0], advantages=[1.0, 1.0, -2.0, -1.0])
    assert gradient == pytest.approx([-2.0, -0.5, 3.0, 2.0])
    assert outputs.token_losses.tolist() == pytest.approx([2.0, 0.5, -3.0, -2.0])
    assert outputs.clipped.tolist() == [True, True, False, True]
