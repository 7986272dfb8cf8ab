import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from agentrl.config.sections import LossConfig, TrainConfig
from agentrl.errors import TrainingError
from agentrl.train.batch import build_pass
from agentrl.train.forward import Learner
from agentrl.train.gradients import TorchGradients
from agentrl.train.loss_inputs import StepSize
from agentrl.train.model import PolicyModule
from agentrl.train.optimizer import build_optimizer
from agentrl.train.parallel import Ranks
from agentrl.train.passes import forward_passes
from agentrl.types import DBRecordData
from tiny_model import random_row, tiny_qwen3


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def sampled_rows(count: int = 10, *, version: int | None = 0) -> list[DBRecordData]:
    rng = np.random.default_rng(5)
    return [random_row(f"r{k}", rng=rng, version=version, advantage=1.0 if k % 2 else -0.7) for k in range(count)]


def learner_for(loss: LossConfig, *, with_reference: bool = False) -> Learner:
    accelerator = Accelerator(cpu=True)
    policy = PolicyModule(tiny_qwen3(), temperature=1.0, chunk_size=64, with_entropy=True)
    reference = copy.deepcopy(policy).requires_grad_(False) if with_reference else None
    optimizer = build_optimizer(policy, TrainConfig(learning_rate=1e-2))
    policy, optimizer = accelerator.prepare(policy, optimizer)
    return Learner(
        accelerator,
        policy=policy,
        optimizer=optimizer,
        reference=reference,
        loss=loss,
        gradients=TorchGradients(accelerator, policy=policy, optimizer=optimizer, ranks=Ranks(), max_norm=1.0),
        ranks=Ranks(),
    )


def step_of(learner: Learner, rows: list[DBRecordData], *, max_tokens: int) -> tuple[dict[str, float], torch.Tensor]:
    """One whole step; returns metrics and all parameters."""
    by_id = {row.id: row for row in rows}
    (planned,) = forward_passes([[row.summary for row in rows]], num_ranks=1, max_tokens=max_tokens)
    passes = [build_pass([by_id[row_id] for row_id in one.row_ids], layout=one.layout) for one in planned]
    size = StepSize(num_sequences=len(rows), num_trained_tokens=sum(int(row.loss_mask.sum()) for row in rows))
    tally = learner.forward_backward(passes, size=size, policy_version=0)
    norm = learner.update(passes, size=size, learning_rate=1e-2)
    return {**tally.metrics(), "grad_norm": norm, "passes": len(passes)}, parameters(learner)


def parameters(learner: Learner) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in learner.policy.parameters()])


LOSSES = [
    LossConfig(),
    LossConfig(aggregation="seq_mean_token_mean", entropy_coef=0.01),
    LossConfig(aggregation="seq_mean_token_sum", loss="MINIRL"),
    LossConfig(aggregation="constant", constant_length=30, loss="CISPO"),
    LossConfig(loss="GSPO", epsilon=3e-4, epsilon_higher=1e-4, aggregation="seq_mean_token_mean"),
    LossConfig(rollout_correction="tis", rollout_correction_normalize=True),
    LossConfig(loss="CROSS_ENTROPY"),
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{loss.loss}-{loss.aggregation}-{loss.rollout_correction}")
def test_many_small_passes_make_the_same_step_as_one_large_pass(loss: LossConfig) -> None:
    rows = sampled_rows(version=None if loss.loss == "CROSS_ENTROPY" else 0)

    whole, after_whole = step_of(learner_for(loss), rows, max_tokens=10_000)
    split, after_split = step_of(learner_for(loss), rows, max_tokens=30)

    assert whole.pop("passes") < split.pop("passes")
    assert split.pop("num_input_tokens") <= whole.pop("num_input_tokens")  # less padding
    assert split == pytest.approx(whole, abs=2e-5)
    # AdamW's first step is the sign of the gradient: where that is 0 up to rounding, the sign may differ.
    assert (after_whole - after_split).abs().median() <= 1e-6
    assert ((after_whole - after_split).abs() > 1e-4).float().mean() < 0.005


def with_logprobs_of(learner: Learner, rows: list[DBRecordData]) -> list[DBRecordData]:
    """The rows as if the policy itself, at its weights of now, had sampled them."""
    recomputed = []
    for row in rows:
        batch = build_pass([row])
        with torch.no_grad():
            logprobs_N, _ = learner.policy(batch.input_ids_BT, batch.predictors_N, batch.labels_N)
        behaviour = row.behaviour_logprobs.copy()
        behaviour[row.loss_mask] = logprobs_N.numpy()
        recomputed.append(replace(row, behaviour_logprobs=behaviour))
    return recomputed


@pytest.mark.parametrize("name", ["GRPO", "GSPO", "CISPO", "CE_GPPO", "REINFORCE"])
def test_old_log_probs_recomputed_in_the_step_are_those_of_a_forward_before_it(name: str) -> None:
    loss = LossConfig(loss=name, epsilon=0.05, epsilon_higher=0.0)
    rows = sampled_rows()
    before = learner_for(loss)

    expected, after_expected = step_of(before, with_logprobs_of(learner_for(loss), rows), max_tokens=60)
    found, after_found = step_of(
        learner_for(loss.model_copy(update={"recompute_old_logprobs": True})), rows, max_tokens=60
    )
    engines, _ = step_of(learner_for(loss), rows, max_tokens=60)

    assert found["ratio_mean"] == 1.0
    assert found["clip_fraction"] == 0.0
    assert engines["ratio_mean"] != pytest.approx(1.0, abs=1e-3)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    assert (after_expected - after_found).abs().median() <= 1e-6
    assert found["mismatch"] == engines["mismatch"] > 0.01, "the mismatch is to the engine, whatever old is"


def test_decoupled_minirl_masks_by_the_recomputed_and_weighs_by_the_engines_log_probs() -> None:
    loss = LossConfig(loss="MINIRL", epsilon=0.05, epsilon_higher=0.0)
    rows = sampled_rows()

    coupled, _ = step_of(learner_for(loss), rows, max_tokens=1000)
    decoupled, _ = step_of(learner_for(loss.model_copy(update={"recompute_old_logprobs": True})), rows, max_tokens=1000)
    unweighted, _ = step_of(
        learner_for(LossConfig(loss="REINFORCE", recompute_old_logprobs=True)), rows, max_tokens=1000
    )

    assert coupled["clip_fraction"] > 0.1
    assert decoupled["clip_fraction"] == 0.0
    assert decoupled["grad_norm"] != pytest.approx(unweighted["grad_norm"], rel=1e-3)


def test_a_row_without_trained_tokens_counts_in_the_denominator_of_sequence_means() -> None:
    rows = sampled_rows(4)
    masked = random_row("masked", rng=np.random.default_rng(0), version=0)
    masked.loss_mask[:] = False
    loss = LossConfig(aggregation="seq_mean_token_mean")

    alone, _ = step_of(learner_for(loss), rows, max_tokens=1000)
    diluted, _ = step_of(learner_for(loss), [*rows, masked], max_tokens=1000)

    assert diluted["loss"] == pytest.approx(alone["loss"] * 4 / 5, rel=1e-5)


def test_the_kl_penalty_starts_at_zero_against_the_start_model_and_then_grows() -> None:
    learner = learner_for(LossConfig(kl_coef=0.1), with_reference=True)
    rows = sampled_rows()

    first, _ = step_of(learner, rows, max_tokens=1000)
    second, _ = step_of(learner, rows, max_tokens=1000)

    assert first["kl_mean"] == pytest.approx(0.0, abs=1e-7)
    assert second["kl_mean"] > 1e-5


def test_a_non_finite_loss_stops_before_the_update_and_names_the_row() -> None:
    learner = learner_for(LossConfig())
    rows = sampled_rows()
    rows[3].advantages[rows[3].loss_mask] = np.inf
    before = parameters(learner).clone()

    with pytest.raises(TrainingError, match=r"non-finite loss or log-probs in row\(s\) r3;"):
        step_of(learner, rows, max_tokens=60)

    assert torch.equal(before, parameters(learner))
    assert not learner.optimizer.state
    assert all(p.grad is None for p in learner.policy.parameters())


class _ExplodingGradient(torch.autograd.Function):
    """The identity, with an infinite gradient: stands for an overflow inside the backward pass."""

    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("inf")


def test_a_non_finite_gradient_stops_before_the_update_and_names_the_rows_of_its_pass() -> None:
    learner = learner_for(LossConfig())
    rows = sampled_rows()
    bad_ids = torch.from_numpy(rows[4].token_ids[:6].astype(np.int64))
    before = parameters(learner).clone()

    def explode(module, arguments, output):
        is_bad = any(torch.equal(ids_T[:6], bad_ids) for ids_T in arguments[0])
        return (_ExplodingGradient.apply(output[0]), output[1]) if is_bad else output

    learner.policy.register_forward_hook(explode)
    with pytest.raises(TrainingError, match=r"gradient norm is (inf|nan) .* first seen in row\(s\) .*r4"):
        step_of(learner, rows, max_tokens=30)

    assert torch.equal(before, parameters(learner))
    assert not learner.optimizer.state
