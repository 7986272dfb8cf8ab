"""A trainer in this process on a tiny model and MemoryStore, with groups that were settled by hand.

Rows carry the start model's own log-probs, so that ratios are 1 and the mismatch is 0 in the first step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from agentrl.config.sections import RunConfig
from agentrl.protocols import Store, TrainStore
from agentrl.store import MemoryStore
from agentrl.train.loop import train
from agentrl.types import DBRecordData, GroupOutcome, GroupSettlement
from factories import make_task
from tiny_model import random_row, run_config


class ListSink:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, Mapping[str, float]]] = []

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.lines.append((step, metrics))

    def close(self) -> None:
        pass


def tiny_run(base: Path, start: Path, **sections: dict[str, object]) -> RunConfig:
    """Two groups per step, any staleness; `sections` override single settings."""
    settings: dict[str, dict[str, object]] = {
        "train": {"max_steps": 4, "save_steps": 2, "data_timeout_s": 1.0, **sections.pop("train", {})},
        "algo": {"tasks_per_step": 2, "max_staleness": 99, **sections.pop("algo", {})},
        **sections,
    }
    return run_config(base, model_dir=start, **settings)


def settle_groups(
    store: MemoryStore, count: int, *, start: Path, returns: Sequence[float] = (1.0, -1.0), seed: int = 11
) -> None:
    """`count` groups of one Record per entry of `returns`, which is its reward and the advantage of its tokens."""
    asyncio.run(settle_groups_in(store, count, start=start, returns=returns, seed=seed))


async def settle_groups_in(
    store: Store, count: int, *, start: Path, returns: Sequence[float] = (1.0, -1.0), seed: int = 11
) -> None:
    """The same for a store that is open on this event loop."""
    rng = np.random.default_rng(seed)
    model = AutoModelForCausalLM.from_pretrained(start).eval()

    for k in range(count):
        task = make_task(f"q{k:02}", num_generations=len(returns))
        ids = [f"{task.id}/g{g}" for g in range(len(returns))]
        rows = [
            with_logprobs_of(model, random_row(f"{name}/s0", rng=rng, version=0, task_id=task.id, advantage=value))
            for name, value in zip(ids, returns, strict=True)
        ]
        values = dict(zip(ids, returns, strict=True))
        settlement = GroupSettlement(task_id=task.id, outcome=GroupOutcome.TRAINABLE, rewards=values, advantages=values)
        await store.insert_tasks([task])
        (claim,) = await store.claim_tasks(split="train", owner=f"w{k}", lease_s=600, limit=1)
        await store.settle_task(claim, settlement, rows)


def with_logprobs_of(model: torch.nn.Module, row: DBRecordData) -> DBRecordData:
    """The row as if `model` had sampled its tokens at temperature 1."""
    ids = torch.from_numpy(row.token_ids.astype(np.int64))
    with torch.no_grad():
        all_TV = torch.log_softmax(model(input_ids=ids.unsqueeze(0)).logits[0], dim=-1)
    logprobs = np.concatenate([[0.0], all_TV[:-1].gather(1, ids[1:, None])[:, 0].numpy()])
    return replace(row, behaviour_logprobs=np.where(row.loss_mask, logprobs, 0).astype(np.float32))


def run_training(config: RunConfig, store: MemoryStore) -> ListSink:
    """Train to the end; what the sinks were told."""

    async def open_store() -> TrainStore:
        return store

    return run_training_on(config, open_store)


def run_training_on(config: RunConfig, open_store: Callable[[], Awaitable[TrainStore]]) -> ListSink:
    """The same with a store that is opened for the trainer."""
    torch.set_num_threads(1)
    sink = ListSink()
    train(config, open_store=open_store, sinks=lambda: [sink])
    return sink
