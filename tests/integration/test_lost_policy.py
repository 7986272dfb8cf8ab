"""A policy folder that is lost while the trainer waits is written again, from the same weights."""

import asyncio
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from agentrl.protocols import TrainStore
from agentrl.store import MemoryStore
from agentrl.train import publish
from agentrl.train.export import is_whole_model
from agentrl.train.loop import train
from agentrl.types import GroupOutcome, GroupSettlement
from factories import make_task
from tiny_model import random_row, run_config, write_tiny_model


async def settle_group(store: MemoryStore, number: int) -> None:
    task = make_task(f"q{number}", num_generations=1)
    row = random_row(f"{task.id}/g0/s0", rng=np.random.default_rng(number), version=0, task_id=task.id, advantage=1.0)
    settlement = GroupSettlement(
        task_id=task.id, outcome=GroupOutcome.TRAINABLE, rewards={f"{task.id}/g0": 1.0}, advantages={}
    )
    await store.insert_tasks([task])
    (claim,) = await store.claim_tasks(split="train", owner="w", lease_s=600, limit=1)
    await store.settle_task(claim, settlement, [row])


def test_a_policy_that_is_lost_between_two_steps_is_written_again_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "CHECK_S", 0.01)
    torch.set_num_threads(1)
    config = run_config(
        tmp_path,
        model_dir=write_tiny_model(tmp_path / "start"),
        train={"max_steps": 2, "save_steps": 10, "data_timeout_s": 30},
        algo={"tasks_per_step": 1, "max_staleness": 9},
    )
    store = MemoryStore()
    asyncio.run(settle_group(store, 0))
    policy = config.run.run_dir / "policy" / "v1"
    before: dict[str, torch.Tensor] = {}

    async def open_store() -> TrainStore:
        return store

    def report(phase: str, step: int) -> None:
        """Called at every look for groups: the first time the folder is lost, and no group comes until it is back."""
        if (phase, step) != ("wait", 2):
            return
        if not before:
            before.update(load_file(policy / "model.safetensors"))
            shutil.rmtree(policy)
        elif is_whole_model(policy) and asyncio.run(store.get_task("train:0:q1")) is None:
            after = load_file(policy / "model.safetensors")
            assert all(torch.equal(after[name], before[name]) for name in before)
            asyncio.run(settle_group(store, 1))

    train(config, open_store=open_store, sinks=list, report=report)
    assert [step.task_ids for step in asyncio.run(store.list_steps())] == [("train:0:q0",), ("train:0:q1",)]
    assert before
