from __future__ import annotations

import pytest

from agentrl.algo.losses import LossConfig
from losses_by_hand import by_hand

CONFIG = LossConfig(loss="MINIRL", epsilon=0.2, epsilon_higher=0.07, is_cap=5.0)


def test_the_mask_looks_at_policy_over_old_and_the_weight_at_policy_over_behaviour() -> None:
    outputs, gradient = by_hand(
        CONFIG,
        ratios=[1.1, 1.3, 0.7, 1.3, 0.7],
        advantages=[1.0, 1.0, -1.0, -1.0, 1.0],
        mismatch=[2.0, 2.0, 2.0, 2.0, 10.0],
    )
    assert gradient == pytest.approx([-2.2, 0.0, 0.0, 2.6, -5.0])  # the last weight is capped at 5
    assert outputs.clipped.tolist() == [False, True, True, False, False]
    assert outputs.token_losses.tolist() == pytest.approx([2.2, 0.0, 0.0, -2.6, 5.0])


def test_without_behaviour_logprobs_the_weight_is_policy_over_old() -> None:
    _, gradient = by_hand(CONFIG, ratios=[1.1, 0.9], advantages=[1.0, -1.0])
    assert gradient == pytest.approx([-1.1, 0.9])


def test_old_taken_from_the_sampler_with_strict_bounds_is_the_uncapped_form_of_agentrl() -> None:
    strict = LossConfig(loss="MINIRL", strict_in_bound=True)
    plain = LossConfig(loss="MINIRL")
    ratios, advantages = [1.29, 1.31, 0.79, 0.81, 9.0], [1.0, 1.0, -1.0, -1.0, -1.0]
    _, gradient = by_hand(strict, ratios=ratios, advantages=advantages)
    assert gradient == pytest.approx([-1.29, 0.0, 0.0, 0.81, 9.0])
    assert by_hand(plain, ratios=ratios, advantages=advantages)[1] == gradient
