from __future__ import annotations

from typing import Any

import pytest

from agentrl.config.legacy import LegacyLossFlags, loss_from_legacy_flags
from agentrl.config.sections import LossConfig
from agentrl.errors import ConfigError


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, {"loss": "GRPO", "importance_weight_cap_ratio": 4.0}),
        (
            {
                "loss_calculater": "MINIRL",
                "token_level_loss": False,
                "strict_in_bound": True,
                "skip_length_normalization": True,
                "adv_scaling": 2.0,
            },
            {"loss": "MINIRL", "strict_in_bound": True, "aggregation": "seq_mean_token_sum", "adv_scaling": 2.0},
        ),
        (
            {"loss_calculater": "GSPO", "token_level_loss": False, "epsilon": 0.001, "epsilon_higher": 0.0},
            {
                "loss": "GSPO",
                "aggregation": "seq_mean_token_mean",
                "epsilon": 0.001,
                "epsilon_higher": 0.0,
                "importance_weight_cap_ratio": 4.0,
            },
        ),
        (
            {"loss_calculater": "MINIRL"},  # bounds [0.2, 2.2]
            {"loss": "MINIRL", "epsilon": 0.8, "epsilon_higher": 0.4},
        ),
        (
            {"loss_calculater": "MINIRL", "out_of_date_decay": 0.1},
            {
                "loss": "MINIRL",
                "epsilon": 0.8,
                "epsilon_higher": 0.4,
                "out_of_date_decay": 0.1,
                "importance_weight_cap_ratio": 1.0,
            },
        ),
        (
            {"beta1": 0.75},
            {"loss": "CE_GPPO", "beta1": 0.75, "beta2": 0.0, "importance_weight_cap_ratio": 4.0},
        ),
        ({"loss_calculater": "CrossEntropy", "strict_in_bound": True}, {"loss": "CROSS_ENTROPY"}),
        ({"strict_in_bound": True, "out_of_date_decay": 0.1}, {"strict_in_bound": True}),
    ],
)
def test_flags_of_agentrl_mean_the_same_loss(flags: dict[str, Any], expected: dict[str, Any]) -> None:
    assert loss_from_legacy_flags(LegacyLossFlags(**flags)) == LossConfig(**expected)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"loss_calculater": "PPO"}, "use one of"),
        ({"loss_calculater": "GSPO", "beta1": 0.5}, "only loss_calculater = GRPO"),
        ({"skip_length_normalization": True}, "no effect with token_level_loss"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loss_from_legacy_flags(LegacyLossFlags(**flags))
