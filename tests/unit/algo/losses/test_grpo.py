from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.algo.losses import LossConfig
from losses_by_hand import by_hand

WORKED_EXAMPLE = Path(__file__).parents[3] / "data" / "mr_search.json"


def test_the_worked_example_with_dual_clip_is_reproduced() -> None:
    example = json.loads(WORKED_EXAMPLE.read_text(encoding="utf-8"))["EX7_ppo"]
    config = LossConfig(epsilon=example["eps"], epsilon_higher=0.0, dual_clip=example["dual_clip"])
    outputs, gradient = by_hand(config, ratios=example["ratio"], advantages=example["A"])
    assert outputs.token_losses.tolist() == pytest.approx(example["loss"])
    assert outputs.token_losses.mean().item() == pytest.approx(example["token_mean"])
    # clipped above, clipped below and bounded by the dual clip have exactly no gradient
    assert gradient == pytest.approx([-1.0, 0.0, -0.7, 1.3, 0.0, 0.0])
    assert gradient[1] == gradient[4] == gradient[5] == 0.0


def test_a_token_exactly_on_the_bound_still_learns() -> None:
    config = LossConfig(epsilon=0.5, epsilon_higher=0.5)
    _, gradient = by_hand(config, ratios=[2.0, 0.5], advantages=[1.0, -1.0])
    assert gradient == pytest.approx([-2.0, 0.5])
