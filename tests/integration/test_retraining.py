"""Groups that are trained again (`max_trained_count`), with real samplers that are too slow: audited afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config import RunConfig
from agentrl.inspector.audit import audit_run
from idle_trainer import Solver, Trainer, sampler, store_with
from scripted_engine import ScriptedEngine
from tiny_chat import write_tiny_chat

NUM_STEPS = 8


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat(tmp_path_factory.mktemp("chat"))


def make_config(*, max_trained_count: int, retrained_interval: int) -> RunConfig:
    values = {
        "store": {"heartbeat_s": 0.02, "lease_s": 5.0},
        "rollout": {
            "num_generations": 2,
            "max_new_tokens": 200,
            "max_prompt_tokens": 2000,
            "max_concurrent_samples_per_process": 2,  # one group at a time, two per step
        },
        "inference": {"context_length": 4000},
        "algo": {
            "tasks_per_step": 2,
            "advantage": "group_mean",
            "max_staleness": 3,
            "max_trained_count": max_trained_count,
            "retrained_interval": retrained_interval,
        },
        "train": {"data_timeout_s": 20.0},
    }
    return RunConfig.model_validate(values)


@pytest.mark.parametrize(("count", "interval"), [(1, 1), (2, 1), (3, 2)])
async def test_an_audit_finds_every_training_of_every_group_accounted_for(
    model_dir: Path, count: int, interval: int
) -> None:
    store = await store_with(6)
    config = make_config(max_trained_count=count, retrained_interval=interval)
    engine = ScriptedEngine(model_dir, Solver())
    trainer = Trainer(config, store, engine)
    async with sampler(config, store, engine):
        entries = await trainer.steps(NUM_STEPS)
    report = await audit_run(store, config=config, run_dir=None)
    assert [finding for result in report.results for finding in result.findings] == []
    times = [task_id for entry in entries for task_id in entry.task_ids]
    most = max(times.count(task_id) for task_id in times)
    assert most <= count  # how often depends on which is quicker, sampler or trainer
    assert any(entry.retained for entry in entries) is (count > 1)
