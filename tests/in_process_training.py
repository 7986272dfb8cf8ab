"""The training loop in this process against MemoryStore, with groups to train and a crash where a test wants one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import numpy as np
import torch
from safetensors.torch import load_file

from agentrl.config.sections import RunConfig
from agentrl.protocols import TrainStore
from agentrl.store import MemoryStore
from agentrl.train.loop import train
from agentrl.types import GroupOutcome, GroupSettlement
from factories import make_task
from tiny_model import random_row


class ListSink:
    def __init__(self) -> None:
        self.lines: list[tuple[int, Mapping[str, float]]] = []
        self.is_closed = False

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.lines.append((step, metrics))

    def close(self) -> None:
        self.is_closed = True


class Crash(BaseException):
    """Ends the trainer between two of its phases, past every handler, as a kill would."""


def run_training(config: RunConfig, store: MemoryStore, *, crash_at: tuple[str, int] | None = None) -> ListSink:
    sink = ListSink()

    async def open_store() -> TrainStore:
        return store

    def report(phase: str, step: int) -> None:
        if (phase, step) == crash_at:
            raise Crash

    train(config, open_store=open_store, sinks=lambda: [sink], report=report)
    return sink


def settle_groups(store: MemoryStore, count: int) -> None:
    """`count` groups of two Records; every third has no signal."""
    rng = np.random.default_rng(11)

    async def write() -> None:
        for k in range(count):
            task = make_task(f"q{k:02}")
            is_dropped = k % 3 == 2
            rows = [
                random_row(f"{task.id}/g{g}/s0", rng=rng, version=0, task_id=task.id, advantage=1.0 - 2.0 * g)
                for g in range(2)
            ]
            settlement = GroupSettlement(
                task_id=task.id,
                outcome=GroupOutcome.DROPPED if is_dropped else GroupOutcome.TRAINABLE,
                drop_reason="zero_advantage" if is_dropped else None,
                rewards={f"{task.id}/g0": 1.0, f"{task.id}/g1": 1.0 if is_dropped else 0.0},
                advantages={},
            )
            await store.insert_tasks([task])
            (claim,) = await store.claim_tasks(split="train", owner=f"w{k}", lease_s=600, limit=1)
            await store.settle_task(claim, settlement, [] if is_dropped else rows)

    asyncio.run(write())


def final_weights(config: RunConfig) -> dict[str, torch.Tensor]:
    return load_file(config.run.run_dir / "final" / "model.safetensors")
