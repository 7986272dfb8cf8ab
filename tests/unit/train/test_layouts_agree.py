"""Loss and gradient of an optimizer step do not depend on how rows are laid out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algo.layouts import LayoutRule, RowLayout
from agentrl.algo.merge import merge_record
from agentrl.algo.trie import summarise_group
from agentrl.config.sections import LossConfig, TrainConfig
from agentrl.train.batch import build_pass
from agentrl.train.forward import Learner, StepSize
from agentrl.train.gradients import TorchGradients
from agentrl.train.model import PolicyModule
from agentrl.train.optimizer import build_optimizer
from agentrl.train.parallel import Ranks
from agentrl.train.passes import forward_passes
from agentrl.train.tree_attention import attention_name
from agentrl.types import DBRecordData
from factories import make_record, make_turn
from tiny_model import tiny_qwen3
from trees import group_rows

LOSSES = [
    LossConfig(),
    LossConfig(aggregation="seq_mean_token_mean", entropy_coef=0.01, dual_clip=3.0),
    LossConfig(aggregation="seq_mean_token_sum", loss="MINIRL"),
    LossConfig(aggregation="constant", constant_length=30, loss="CISPO"),
    LossConfig(loss="GSPO", epsilon=3e-4, epsilon_higher=1e-4, aggregation="seq_mean_token_mean"),
    LossConfig(rollout_correction="tis", rollout_correction_level="sequence", rollout_correction_normalize=True),
    LossConfig(loss="CROSS_ENTROPY"),
]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def learner_for(loss: LossConfig) -> Learner:
    accelerator = Accelerator(cpu=True)
    model = tiny_qwen3()
    model.set_attn_implementation(attention_name("sdpa"))
    policy = PolicyModule(model, temperature=1.0, chunk_size=64, with_entropy=True)
    policy, optimizer = accelerator.prepare(policy, build_optimizer(policy, TrainConfig()))
    return Learner(
        accelerator,
        policy=policy,
        optimizer=optimizer,
        reference=None,
        loss=loss,
        gradients=TorchGradients(accelerator, policy=policy, optimizer=optimizer, ranks=Ranks(), max_norm=1.0),
        ranks=Ranks(),
    )


def step_in(
    layout: str, groups: Sequence[Sequence[DBRecordData]], *, loss: LossConfig, max_tokens: int = 10_000
) -> tuple[dict[str, float], torch.Tensor]:
    """Metrics and gradient of one step over groups, as the trainer plans and computes it."""
    learner = learner_for(loss)
    by_id = {row.id: row for rows in groups for row in rows}
    (planned,) = forward_passes(
        [summarise_group(rows) for rows in groups], num_ranks=1, max_tokens=max_tokens, rule=LayoutRule(layout=layout)
    )
    if layout != "auto":
        assert {one.layout for one in planned} == {RowLayout(layout)}
    passes = [build_pass([by_id[row_id] for row_id in one.row_ids], layout=one.layout) for one in planned]
    num_trained = sum(int(row.loss_mask.sum()) for row in by_id.values())
    size = StepSize(num_sequences=len(by_id), num_trained_tokens=num_trained)
    tally = learner.forward_backward(passes, size=size, policy_version=0)
    metrics = tally.metrics() if num_trained else {}
    metrics.pop("num_input_tokens", None)
    return metrics, torch.cat([parameter.grad.flatten() for parameter in learner.policy.parameters()])


def two_groups(*, version: int | None = 0) -> list[list[DBRecordData]]:
    groups = [group_rows(seed=seed, version=version) for seed in (0, 1)]
    for number, rows in enumerate(groups):
        groups[number] = [renamed(row, f"q{number}") for row in rows]
    return groups


def renamed(row: DBRecordData, task: str) -> DBRecordData:
    return replace(row, id=row.id.replace("q", task, 1), task_id=f"train:0:{task}")


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{loss.loss}-{loss.aggregation}-{loss.rollout_correction}")
def test_every_layout_gives_the_loss_and_the_gradient_of_linear(loss: LossConfig) -> None:
    groups = two_groups(version=None if loss.loss == "CROSS_ENTROPY" else 0)
    expected, gradient = step_in("linear", groups, loss=loss)

    for layout in ("per_call", "tree", "auto"):
        metrics, found = step_in(layout, groups, loss=loss)
        assert metrics == pytest.approx(expected, rel=1e-6, abs=1e-6)
        assert (found - gradient).norm() <= 1e-6 * gradient.norm()

    metrics, found = step_in("tree", groups, loss=loss, max_tokens=60)  # every tree is cut
    assert metrics == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert (found - gradient).norm() <= 1e-6 * gradient.norm()


@st.composite
def branching_records(draw: st.DrawFn) -> list[DBRecordData]:
    """Rows of two generations whose turns branch at random and often sample the same tokens."""
    rows = []
    small_ids = st.lists(st.integers(0, 2), min_size=1, max_size=4)
    for generation in range(2):
        record = make_record(generation=generation)
        turns = []
        for index in range(draw(st.integers(1, 5))):
            completion = draw(small_ids)
            turns.append(
                make_turn(
                    record,
                    index=index,
                    parent_turn=draw(st.integers(-1, index - 1)),
                    prompt_ids=draw(small_ids),
                    completion_ids=completion,
                    logprobs=[draw(st.floats(-6, -2)) for _ in completion],
                )
            )
        advantages = [draw(st.sampled_from([-1.0, 0.5, 2.0])) for _ in turns]
        rows += merge_record(record, turns, reward=1.0, advantages=advantages)
    return rows


@settings(max_examples=25, deadline=None)
@given(rows=branching_records())
def test_any_tree_of_turns_gives_the_same_gradient_in_every_layout(rows: list[DBRecordData]) -> None:
    _, gradient = step_in("linear", [rows], loss=LossConfig())
    for layout in ("per_call", "tree"):
        _, found = step_in(layout, [rows], loss=LossConfig())
        assert (found - gradient).norm() <= 2e-6 * gradient.norm() + 1e-9


@given(rows=branching_records())
def test_every_sampled_token_is_trained_once_with_its_own_numbers_in_every_layout(rows: list[DBRecordData]) -> None:
    expected = build_pass(rows)
    for layout in RowLayout:
        batch = build_pass(rows, layout=layout)
        for name in ("labels_N", "sequence_ids_N", "advantages_N", "policy_versions_N", "behaviour_logprobs_N"):
            assert torch.equal(getattr(batch, name), getattr(expected, name))
        fed = batch.input_ids_BT.flatten()
        at = 0
        for row in rows:
            for position in np.flatnonzero(row.loss_mask):
                assert int(fed[batch.predictors_N[at]]) == row.token_ids[position - 1]
                at += 1
        assert at == batch.num_trained_tokens


def test_the_order_of_rows_and_groups_does_not_matter() -> None:
    groups = two_groups()
    metrics, gradient = step_in("tree", groups, loss=LossConfig())
    turned, found = step_in("tree", [rows[::-1] for rows in groups[::-1]], loss=LossConfig())
    assert turned == pytest.approx(metrics, rel=1e-6, abs=1e-7)
    assert (found - gradient).norm() <= 1e-6 * gradient.norm()


@pytest.mark.parametrize("layout", ["per_call", "linear", "tree"])
def test_a_masked_token_has_exactly_no_gradient_whatever_stands_under_the_mask(layout: str) -> None:
    groups = two_groups()
    masked = groups[0][1]
    masked.loss_mask[:] = False
    _, gradient = step_in(layout, groups, loss=LossConfig())
    masked.advantages[:] = np.inf
    masked.behaviour_logprobs[:] = np.nan
    _, found = step_in(layout, groups, loss=LossConfig())
    assert torch.equal(found, gradient)

    for row in (row for rows in groups for row in rows):
        row.loss_mask[:] = False
    _, nothing = step_in(layout, groups, loss=LossConfig())
    assert not nothing.any()
