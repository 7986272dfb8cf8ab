"""S3 and L4 with real processes: a trainer that is killed with SIGKILL and resumed equals one that never was."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import trainer_process
from agentrl.config.sections import RunConfig
from agentrl.store import open_store
from agentrl.train.loop import train
from agentrl.types import StepStatus, TrainStep
from tiny_model import random_row, run_config, write_tiny_model

NUM_STEPS = 6
PROCESS_TIMEOUT_S = 90.0
CHILD_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": ""}


def supervised_config(base: Path, start: Path) -> RunConfig:
    return run_config(
        base,
        model_dir=start,
        rollout={"enable_sampling": False},
        loss={"loss": "CROSS_ENTROPY"},
        train={
            "max_steps": NUM_STEPS,
            "save_steps": 2,
            "sft_batch_size": 4,
            "max_tokens": 64,
            "warmup_steps": 3,
            "sequence_layout": "tree",
        },
    )


async def insert_rows(uri: str, database: str) -> None:
    store = open_store(uri, database=database)
    await store.prepare()
    rng = np.random.default_rng(3)
    await store.insert_sequences([random_row(f"r{k:02}", rng=rng) for k in range(10)])
    await store.close()


async def read_ledger(uri: str, database: str) -> list[TrainStep]:
    store = open_store(uri, database=database)
    steps = await store.list_steps()
    await store.close()
    return steps


def run_and_kill(config: RunConfig, uri: str, database: str, *, kill_at: tuple[str, int]) -> None:
    spec = {"config": config.model_dump(mode="json"), "uri": uri, "database": database, "kill_at": kill_at}
    path = config.run.output_dir / "spec.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(spec))
    process = subprocess.run(
        [sys.executable, trainer_process.__file__, str(path)],
        env={**os.environ, **CHILD_ENVIRONMENT},
        capture_output=True,
        timeout=PROCESS_TIMEOUT_S,
        check=False,
    )
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()


def metric_lines(config: RunConfig) -> Sequence[tuple[int, float]]:
    lines = (config.run.run_dir / "metrics.jsonl").read_text().splitlines()
    return [(line["step"], line["loss"]) for line in map(json.loads, lines)]


def test_four_kills_change_neither_a_bit_of_the_weights_nor_the_ledger(
    tmp_path: Path, mongo_uri: str, database_name: str
) -> None:
    torch.set_num_threads(1)
    start = write_tiny_model(tmp_path / "start")
    straight, killed = supervised_config(tmp_path / "straight", start), supervised_config(tmp_path / "killed", start)
    databases = {"straight": database_name + "_s", "killed": database_name + "_k"}
    for database in databases.values():
        asyncio.run(insert_rows(mongo_uri, database))
    train(
        straight,
        open_store=trainer_process.mongo_opener(mongo_uri, databases["straight"]),
        sinks=trainer_process.jsonl_sinks(straight),
    )

    kills = [
        ("forward_backward", 1),  # the plan is in the ledger, nothing else
        ("checkpoint", 2),  # after the optimizer step, before anything of it is on disk
        ("publish", 4),  # the checkpoint is complete; neither published nor committed
        ("commit", 6),  # published, not committed
    ]
    for kill_at in kills:
        run_and_kill(killed, mongo_uri, databases["killed"], kill_at=kill_at)
    train(
        killed,
        open_store=trainer_process.mongo_opener(mongo_uri, databases["killed"]),
        sinks=trainer_process.jsonl_sinks(killed),
    )

    expected = load_file(straight.run.run_dir / "final" / "model.safetensors")
    resumed = load_file(killed.run.run_dir / "final" / "model.safetensors")
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(weight, resumed[name]) for name, weight in expected.items())
    ledgers = [asyncio.run(read_ledger(mongo_uri, database)) for database in databases.values()]
    consumed = [[(step.step, step.sequence_ids, step.status) for step in ledger] for ledger in ledgers]
    assert consumed[0] == consumed[1]
    assert {step.status for ledger in ledgers for step in ledger} == {StepStatus.COMMITTED}
    assert [step.attempts for step in ledgers[1]] == [3, 2, 1, 1, 1, 1]
    assert metric_lines(killed) == metric_lines(straight)
    assert [step for step, _ in metric_lines(killed)] == list(range(1, NUM_STEPS + 1))
    assert AutoModelForCausalLM.from_pretrained(killed.run.run_dir / "final").num_parameters() > 0
