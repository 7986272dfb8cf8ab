"""Sampling and training in turns (`sync_sampling`, no staleness): whatever ends when, nobody waits for ever.

The sampler's worker, the groups, the planner and the ledger are real; the engine is scripted, the optimizer idle.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.config import RunConfig
from agentrl.errors import UnavailableError
from agentrl.store import MemoryStore
from agentrl.types import ServiceStatus, TaskStatus, TrainStep
from idle_trainer import LIMIT_S, Solver, Trainer, has_result, sampler, store_with
from scripted_engine import ScriptedEngine
from tiny_chat import write_tiny_chat


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat(tmp_path_factory.mktemp("chat"))


def make_config(*, tasks_per_step: int, num_train_epochs: int | None = None, data_timeout_s: float = 20.0) -> RunConfig:
    values = {
        "store": {"heartbeat_s": 0.02, "lease_s": 0.5},
        "rollout": {
            "sync_sampling": True,
            "num_generations": 2,
            "max_new_tokens": 200,
            "max_prompt_tokens": 2000,
            "num_train_epochs": num_train_epochs,
        },
        "inference": {"context_length": 4000},
        "algo": {"tasks_per_step": tasks_per_step, "advantage": "group_mean"},
        "train": {"data_timeout_s": data_timeout_s},
    }
    config = RunConfig.model_validate(values)
    assert config.algo.max_staleness == 0
    return config


async def assert_on_policy(store: MemoryStore, entries: list[TrainStep]) -> None:
    """Every trained token is of the version its step trains."""
    for entry in entries:
        for row in await store.load_sequences(entry.sequence_ids):
            assert set(row.policy_versions[row.loss_mask].tolist()) == {entry.policy_version}


@pytest.mark.parametrize(("num_tasks", "tasks_per_step", "num_epochs"), [(3, 2, 2), (2, 3, 3), (1, 4, 4), (5, 3, 3)])
async def test_epochs_that_end_in_the_middle_of_a_step_are_continued_by_the_next(
    model_dir: Path, num_tasks: int, tasks_per_step: int, num_epochs: int
) -> None:
    store = await store_with(num_tasks)
    config = make_config(tasks_per_step=tasks_per_step, num_train_epochs=num_epochs)
    engine = ScriptedEngine(model_dir, Solver())
    trainer = Trainer(config, store, engine)
    async with sampler(config, store, engine):
        entries = await trainer.steps(num_tasks * num_epochs // tasks_per_step)
    trained = [task_id for entry in entries for task_id in entry.task_ids]
    assert len(trained) == len(set(trained)) == len(entries) * tasks_per_step
    await assert_on_policy(store, entries)


async def test_rollouts_a_sampler_left_between_two_turns_do_not_keep_the_trainer_waiting(model_dir: Path) -> None:
    store = await store_with(4)
    config = make_config(tasks_per_step=2)
    engine = ScriptedEngine(model_dir, Solver())
    engine.holds = has_result  # every Record gets its first turn and then hangs
    trainer = Trainer(config, store, engine)
    training = asyncio.create_task(trainer.steps(3))
    async with asyncio.timeout(LIMIT_S):
        async with sampler(config, store, engine):
            while len([record for record in await store.list_records() if record.turn_ids]) < 4:
                await asyncio.sleep(0.005)
        engine.holds = lambda context: False
        async with sampler(config, store, engine):
            entries = await training
    assert len(entries) == 3
    await assert_on_policy(store, entries)
    assert all(len(record.turn_ids) == 2 for record in await store.list_records() if record.is_final)


async def test_a_service_that_is_late_with_a_new_version_delays_sampling_but_not_for_ever(model_dir: Path) -> None:
    store = await store_with(4)
    config = make_config(tasks_per_step=2)
    engine = ScriptedEngine(model_dir, Solver())
    trainer = Trainer(config, store, engine)
    late = asyncio.create_task(_announce_late(store, trainer))
    async with sampler(config, store, engine):
        entries = await trainer.steps(3)
    late.cancel()
    await assert_on_policy(store, entries)


async def _announce_late(store: MemoryStore, trainer: Trainer) -> None:
    """After every version the service goes down for a moment, in the middle of whatever runs."""
    while True:
        for service in await store.list_services():
            await store.put_service(replace(service, status=ServiceStatus.DOWN))
            await asyncio.sleep(0.02)
            latest = await store.latest_policy()
            version = 0 if latest is None else latest.version
            await store.put_service(replace(service, status=ServiceStatus.UP, policy_version=version))
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(("num_tasks", "tasks_per_step", "num_epochs"), [(1, 2, 1), (3, 2, 1), (2, 8, 3)])
async def test_fewer_tasks_than_a_step_needs_are_an_error_in_time_and_not_a_deadlock(
    model_dir: Path, num_tasks: int, tasks_per_step: int, num_epochs: int
) -> None:
    store = await store_with(num_tasks)
    config = make_config(tasks_per_step=tasks_per_step, num_train_epochs=num_epochs, data_timeout_s=0.8)
    engine = ScriptedEngine(model_dir, Solver())
    trainer = Trainer(config, store, engine)
    whole_steps, left = divmod(num_tasks * num_epochs, tasks_per_step)
    started = time.monotonic()
    message = (
        rf"step {whole_steps + 1}: {left} of tasks_per_step = {tasks_per_step} groups settled within .*tasks left\?"
    )
    async with sampler(config, store, engine):
        with pytest.raises(UnavailableError, match=message):
            await trainer.steps(whole_steps + 1)
    assert time.monotonic() - started < LIMIT_S / 2
    counts = await store.count_tasks(split="train")
    assert (counts[TaskStatus.PENDING], counts[TaskStatus.RUNNING], counts[TaskStatus.SETTLED]) == (0, 0, left)


async def test_stale_groups_are_dropped_and_others_sampled_in_their_place(model_dir: Path) -> None:
    store = await store_with(12)
    config = make_config(tasks_per_step=2)
    engine = ScriptedEngine(model_dir, Solver())
    trainer = Trainer(config, store, engine)

    def serve(version: int) -> None:
        """The service says it has version 1, but answers with the old weights for a while."""
        engine.version = version if version != 1 else 0
        if version == 1:
            asyncio.get_running_loop().call_later(0.3, setattr, engine, "version", 1)

    trainer.serve = serve
    async with sampler(config, store, engine):
        entries = await trainer.steps(3)
    assert entries[1].metrics["num_dropped_stale"] >= 2
    assert len(entries) == 3
    await assert_on_policy(store, entries)
