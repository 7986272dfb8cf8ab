from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from agentrl.config.sections import LossConfig, TrainConfig
from agentrl.errors import ConfigError
from agentrl.train.batch import PassBatch, build_pass
from agentrl.train.forward import Learner
from agentrl.train.gradients import TorchGradients
from agentrl.train.loss_inputs import StepSize
from agentrl.train.model import PolicyModule
from agentrl.train.optimizer import build_optimizer
from agentrl.train.parallel import Ranks
from agentrl.train.whatif import Comparison, NamedLoss, compare_losses
from agentrl.types import DBRecordData
from tiny_model import random_row, tiny_qwen3

LOSSES = [
    LossConfig(epsilon=0.05, epsilon_higher=0.0),
    LossConfig(loss="GSPO", epsilon=3e-4, epsilon_higher=1e-4, aggregation="seq_mean_token_mean"),
    LossConfig(loss="MINIRL", is_cap=5.0, aggregation="seq_mean_token_sum"),
    LossConfig(loss="CISPO", entropy_coef=0.01),
    LossConfig(loss="REINFORCE", kl_coef=0.1),
    LossConfig(rollout_correction="tis", rollout_correction_normalize=True),
]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def policy() -> PolicyModule:
    return PolicyModule(tiny_qwen3(), temperature=1.0, chunk_size=64, with_entropy=True)


def reference() -> PolicyModule:
    return PolicyModule(tiny_qwen3(seed=1), temperature=1.0, chunk_size=64, with_entropy=False)


def rows() -> list[DBRecordData]:
    rng = np.random.default_rng(5)
    return [random_row(f"r{k}", rng=rng, version=0, advantage=1.0 if k % 2 else -0.7) for k in range(6)]


def size_of(found: Sequence[DBRecordData]) -> StepSize:
    return StepSize(num_sequences=len(found), num_trained_tokens=sum(int(row.loss_mask.sum()) for row in found))


def compare(*losses: LossConfig, passes: Sequence[PassBatch], size: StepSize) -> Comparison:
    named = [NamedLoss(name=loss.loss, config=loss) for loss in losses]
    return compare_losses(passes, losses=named, policy=policy(), reference=reference(), size=size, policy_version=0)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{loss.loss}-{loss.rollout_correction}")
def test_a_replay_has_the_loss_and_gradient_norm_of_the_trainer(loss: LossConfig) -> None:
    found = rows()
    passes, size = [build_pass(found[:4]), build_pass(found[4:])], size_of(found)
    accelerator = Accelerator(cpu=True)
    module = policy()
    trained, optimizer = accelerator.prepare(module, build_optimizer(module, TrainConfig()))
    learner = Learner(
        accelerator,
        policy=trained,
        optimizer=optimizer,
        reference=reference(),
        loss=loss,
        gradients=TorchGradients(accelerator, policy=trained, optimizer=optimizer, ranks=Ranks(), max_norm=1.0),
        ranks=Ranks(),
    )
    tally = learner.forward_backward(copy.deepcopy(passes), size=size, policy_version=0)
    norm = learner.update(passes, size=size, learning_rate=1e-3)

    (replay,) = compare(loss, passes=passes, size=size).replays

    metrics = tally.metrics()
    assert replay.loss == pytest.approx(metrics["loss"], rel=1e-5, abs=1e-7)
    assert replay.grad_norm == pytest.approx(norm, rel=1e-5)
    for name in ("clip_fraction", "ratio_mean", "ratio_max", "approx_kl", "entropy"):
        assert getattr(replay, name) == pytest.approx(metrics[name], rel=1e-5, abs=1e-7)


def test_losses_compared_together_do_not_influence_each_other() -> None:
    found = rows()
    passes, size = [build_pass(found)], size_of(found)
    together = compare(*LOSSES, passes=passes, size=size)
    alone = [compare(loss, passes=passes, size=size).replays[0] for loss in LOSSES]
    for one, other in zip(together.replays, alone, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-6)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
    matrix = np.array(together.cosines)
    assert np.diag(matrix) == pytest.approx(np.ones(len(LOSSES)), abs=1e-5)
    assert matrix == pytest.approx(matrix.T, abs=1e-6)
    assert np.abs(matrix).max() <= 1 + 1e-5


def test_scaling_all_advantages_turns_no_gradient_and_opposite_signs_turn_it_round() -> None:
    found = rows()
    passes, size = [build_pass(found)], size_of(found)
    plain, scaled = LossConfig(loss="REINFORCE"), LossConfig(loss="REINFORCE", adv_scaling=3.0)
    result = compare(plain, scaled, passes=passes, size=size)
    assert result.cosines[0][1] == pytest.approx(1.0, abs=1e-5)
    assert result.replays[1].grad_norm == pytest.approx(3 * result.replays[0].grad_norm, rel=1e-5)
    assert [replay.effective_sample_fraction for replay in result.replays] == pytest.approx([1.0, 1.0])


def test_the_effective_sample_size_is_that_of_the_gradient_factors() -> None:
    """Rows whose tokens have ratio 1 or 3 exactly: GRPO mutes the ones that went too far, CISPO weighs them."""
    found = rows()[:2]
    with torch.no_grad():
        batch = build_pass(found)
        logprobs = policy()(batch.input_ids_BT, batch.predictors_N, batch.labels_N)[0]
    ratios = torch.where(batch.sequence_ids_N == 0, 1.0, 3.0)
    batch = replace(
        batch, behaviour_logprobs_N=logprobs - ratios.log(), advantages_N=torch.ones_like(batch.advantages_N)
    )
    first, second = (int((batch.sequence_ids_N == k).sum()) for k in range(2))
    grpo, cispo = compare(LossConfig(), LossConfig(loss="CISPO"), passes=[batch], size=size_of(found)).replays
    assert grpo.muted_fraction == pytest.approx(second / (first + second))
    assert grpo.effective_sample_fraction == pytest.approx(first / (first + second))
    assert cispo.muted_fraction == 0.0
    expected = (first + 3 * second) ** 2 / ((first + second) * (first + 9 * second))
    assert cispo.effective_sample_fraction == pytest.approx(expected, rel=1e-4)


def test_a_loss_the_step_lacks_tensors_for_is_refused() -> None:
    found = [random_row("r", rng=np.random.default_rng(1), version=None)]
    with pytest.raises(ConfigError, match="behaviour_logprobs"):
        compare(LossConfig(rollout_correction="tis"), passes=[build_pass(found)], size=size_of(found))
