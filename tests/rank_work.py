"""What tests let several ranks do (tests/gloo_ranks.py): one step's gradient, or a whole training run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from agentrl.config.sections import RunConfig
from agentrl.errors import TrainingError
from agentrl.store import open_store
from agentrl.train.batch import PassBatch, build_pass
from agentrl.train.distribution import start_accelerator
from agentrl.train.export import model_state
from agentrl.train.forward import Learner
from agentrl.train.loop import train
from agentrl.train.loss_inputs import StepSize
from agentrl.train.parallel import arrange_ranks
from agentrl.train.passes import forward_passes
from agentrl.train.session import load_learner
from agentrl.train.zero3 import is_partitioned
from agentrl.types import DBRecordData, GroupOutcome, GroupSettlement
from factories import make_task
from tiny_model import random_row
from trainer_process import jsonl_sinks, mongo_opener


def step_rows(*, count: int = 7) -> list[DBRecordData]:
    """Rows of unequal length, one of them without a trained token."""
    rng = np.random.default_rng(5)
    rows = [random_row(f"r{k}", rng=rng, version=0, advantage=1.0 if k % 2 else -0.7) for k in range(count)]
    rows[2].loss_mask[:] = False
    return rows


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A learner on this rank and its part of a step over `step_rows`."""

    accelerator: Accelerator
    learner: Learner
    passes: list[PassBatch]
    size: StepSize


def prepared_step(config: RunConfig) -> Prepared:
    accelerator = start_accelerator(config)
    ranks = arrange_ranks(
        config.train,
        num_processes=accelerator.num_processes,
        process_index=accelerator.process_index,
        device_type=accelerator.device.type,
    )
    learner, rule = load_learner(config, accelerator=accelerator, ranks=ranks, checkpoint=None)
    rows = {row.id: row for row in step_rows()}
    plan = forward_passes(
        [[row.summary for row in rows.values()]],
        num_ranks=ranks.num_data,
        max_tokens=config.train.max_tokens,
        rule=rule,
    )
    return Prepared(
        accelerator=accelerator,
        learner=learner,
        passes=[
            build_pass([rows[row_id] for row_id in one.row_ids], layout=one.layout) for one in plan[ranks.data_rank]
        ],
        size=StepSize(
            num_sequences=len(rows), num_trained_tokens=sum(int(row.loss_mask.sum()) for row in rows.values())
        ),
    )


class _ExplodingGradient(torch.autograd.Function):
    """The identity, with an infinite gradient: stands for an overflow inside the backward pass."""

    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("inf")


def refuse_a_bad_gradient(config_values: dict[str, Any]) -> None:
    """On the last rank one gradient overflows: every rank must refuse the step, and no weight may change."""
    step = prepared_step(RunConfig.model_validate(config_values))
    accelerator, learner = step.accelerator, step.learner
    if accelerator.process_index == accelerator.num_processes - 1:
        accelerator.unwrap_model(learner.policy).causal_lm.base_model.register_forward_hook(
            lambda module, arguments, output: setattr(
                output, "last_hidden_state", _ExplodingGradient.apply(output.last_hidden_state)
            )
        )
    before = model_state(accelerator, learner.policy)
    before = {name: weight.clone() for name, weight in before.items()}
    learner.forward_backward(step.passes, size=step.size, policy_version=0)
    with pytest.raises(TrainingError, match=r"gradient norm is (nan|inf) although the loss is finite; first seen in"):
        learner.update(step.passes, size=step.size, learning_rate=1e-2)
    after = model_state(accelerator, learner.policy)
    assert before.keys() == after.keys()
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())


def write_gradient(config_values: dict[str, Any], path: Path) -> None:
    """The whole gradient of one step over `step_rows`, its norm and the tally, written by rank 0."""
    step = prepared_step(RunConfig.model_validate(config_values))
    accelerator, learner = step.accelerator, step.learner
    tally = learner.forward_backward(step.passes, size=step.size, policy_version=0)
    norm = learner.gradients.clip()
    gradients = {}
    for name, parameter in accelerator.unwrap_model(learner.policy).causal_lm.named_parameters():
        gradients[name] = _whole_gradient(parameter).detach().clone().contiguous()
    if accelerator.is_main_process:
        gradients["held.q_proj"] = torch.tensor(_held(learner.policy, "layers.0.self_attn.q_proj.weight"))
        numbers = {f"metric.{name}": torch.tensor(value) for name, value in tally.metrics().items()}
        save_file({**gradients, **numbers, "metric.grad_norm": torch.tensor(norm)}, path)


async def settle_groups(uri: str, database: str, count: int) -> None:
    """Groups of three Records of unequal length, so that the ranks get unequal work; they share their first tokens."""
    store = open_store(uri, database=database)
    await store.prepare()
    rng = np.random.default_rng(21)
    for k in range(count):
        task = make_task(f"q{k:02}", num_generations=3)
        rows = [
            random_row(f"{task.id}/g{g}/s0", rng=rng, version=0, task_id=task.id, advantage=(1.0, -0.5, -0.4)[g])
            for g in range(3)
        ]
        for row in rows[1:]:
            row.token_ids[:8] = rows[0].token_ids[:8]
        rewards = {f"{task.id}/g{g}": float(g == 0) for g in range(3)}
        settlement = GroupSettlement(task_id=task.id, outcome=GroupOutcome.TRAINABLE, rewards=rewards, advantages={})
        await store.insert_tasks([task])
        (claim,) = await store.claim_tasks(split="train", owner=f"w{k}", lease_s=600, limit=1)
        await store.settle_task(claim, settlement, rows)
    await store.close()


def train_on_mongo(config_values: dict[str, Any], uri: str, database: str) -> None:
    """A training run, as a launched process makes it."""
    config = RunConfig.model_validate(config_values)
    train(config, open_store=mongo_opener(uri, database), sinks=jsonl_sinks(config))


def _held(policy: torch.nn.Module, suffix: str) -> int:
    """How many numbers of a parameter this rank holds."""
    (parameter,) = [parameter for name, parameter in policy.named_parameters() if name.endswith(suffix)]
    if is_partitioned(parameter):
        return parameter.ds_tensor.numel()
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()


def _whole_gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    if is_partitioned(parameter):
        from deepspeed.utils import safe_get_full_grad

        return safe_get_full_grad(parameter)
    return parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
