from __future__ import annotations

import pytest

from agentrl.cli.whatif import named_loss
from agentrl.config.sections import LossConfig
from agentrl.errors import ConfigError


def test_a_compared_loss_takes_over_the_runs_options_that_it_looks_at() -> None:
    run = LossConfig(dual_clip=3.0, epsilon=0.3, aggregation="constant", constant_length=5)
    cispo = named_loss("CISPO", base=run).config
    assert (cispo.dual_clip, cispo.epsilon, cispo.constant_length) == (None, 0.3, 5)
    token_mean = named_loss("GRPO,aggregation=token_mean", base=run).config
    assert (token_mean.dual_clip, token_mean.constant_length) == (3.0, None)
    with pytest.raises(ConfigError, match="has no clipped surrogate"):
        named_loss("CISPO,dual_clip=3", base=run)
