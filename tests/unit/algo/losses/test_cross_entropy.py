from __future__ import annotations

from agentrl.algo.losses import LossConfig
from losses_by_hand import by_hand


def test_every_unmasked_token_is_imitated_whatever_its_advantage() -> None:
    outputs, gradient = by_hand(LossConfig(loss="CROSS_ENTROPY"), ratios=[1.0, 1.0], advantages=[0.0, -3.0])
    assert outputs.token_losses.tolist() == [1.0, 1.0]
    assert gradient == [-1.0, -1.0]
