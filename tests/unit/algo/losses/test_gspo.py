from __future__ import annotations

import math

import pytest
import torch

from agentrl.algo.losses import LossConfig
from golden_losses import Golden, run_golden
from losses_by_hand import by_hand


def test_golden_sequence_ratios_and_clipped_rows_are_reproduced() -> None:
    config = LossConfig(loss="GSPO", epsilon=3e-4, epsilon_higher=1e-4, aggregation="seq_mean_token_mean")
    outputs = run_golden("gspo_near", config, dtype=torch.float64)
    golden = Golden("gspo_near", torch.float64)
    expected = golden.flatten(golden.expected["sequence_ratio"])
    torch.testing.assert_close(outputs.ratios[golden.mask], expected[golden.mask], rtol=0, atol=1e-9)
    rows = golden.sequence_ids[outputs.clipped].unique().tolist()
    assert rows == golden.expected["clipped_rows"]


def test_every_token_carries_the_ratio_of_its_sequence_and_its_own_advantage() -> None:
    config = LossConfig(loss="GSPO", epsilon=0.5, epsilon_higher=0.0)
    outputs, gradient = by_hand(config, ratios=[1.44, 1.0, 0.9], advantages=[1.0, -2.0, 1.0], sequence_ids=[0, 0, 1])
    assert outputs.ratios.tolist() == pytest.approx([1.2, 1.2, 0.9])
    assert gradient == pytest.approx([-1.2, 2.4, -0.9])


def test_an_exploding_sequence_ratio_stays_finite_and_without_gradient() -> None:
    outputs, gradient = by_hand(LossConfig(loss="GSPO"), ratios=[math.exp(30.0)], advantages=[-1.0])
    assert outputs.loss.item() == pytest.approx(math.exp(10.0))
    assert gradient == [0.0]
