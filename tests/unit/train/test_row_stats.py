from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from agentrl.algo.losses import LossConfig, build_loss
from agentrl.train.batch import build_pass
from agentrl.train.loss_inputs import PassLogprobs, StepSize, loss_inputs
from agentrl.train.row_stats import row_stats
from tiny_model import random_row


def test_each_row_is_told_apart_and_a_row_without_trained_tokens_is_left_out() -> None:
    rng = np.random.default_rng(0)
    rows = [random_row(f"t/g{k}/s0", rng=rng, version=0, advantage=1.0 - 2.0 * k) for k in range(2)]
    masked = replace(rows[0], id="t/g9/s0", loss_mask=np.zeros_like(rows[0].loss_mask))
    batch = build_pass([rows[0], masked, rows[1]])
    logprobs_N = torch.linspace(-2.0, -1.0, batch.num_trained_tokens)
    entropy_N = torch.where(batch.sequence_ids_N == 0, 0.1, 0.7)
    config = LossConfig(loss="REINFORCE")
    inputs = loss_inputs(
        batch,
        logprobs=PassLogprobs(policy_N=logprobs_N, entropy_N=entropy_N, reference_N=None),
        config=config,
        size=StepSize(num_sequences=3, num_trained_tokens=batch.num_trained_tokens),
        policy_version=0,
        mean_rollout_weight=None,
    )
    outputs = build_loss(config)(inputs)

    good, bad = row_stats(batch, logprobs_N=logprobs_N, entropy_N=entropy_N, weights_N=inputs.weights, outputs=outputs)

    own = logprobs_N[batch.sequence_ids_N == 0]
    assert (good.record_id, bad.record_id) == ("t/g0", "t/g1")
    assert good.num_tokens == good.num_positive == own.numel()
    assert bad.num_positive == 0
    assert good.logprob_sum == good.positive_logprob_sum == pytest.approx(float(own.sum()), rel=1e-6)
    assert good.entropy_sum / good.num_tokens == pytest.approx(0.1)
    assert bad.entropy_sum / bad.num_tokens == pytest.approx(0.7)
    assert batch.behaviour_logprobs_N is not None
    gap = (own - batch.behaviour_logprobs_N[batch.sequence_ids_N == 0]).abs()
    assert good.mismatch_sum == pytest.approx(float(gap.sum()), rel=1e-6)
    assert good.loss_share == pytest.approx(float(-own.sum()) / batch.num_trained_tokens, rel=1e-6)
