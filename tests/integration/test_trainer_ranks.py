"""L1 over ranks: two gloo ranks with FSDP2 make the same steps as one process, and resume from sharded checkpoints."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

import trainer_process
from agentrl.config.sections import RunConfig
from agentrl.train.loop import train
from gloo_ranks import FSDP2_ENVIRONMENT, ZERO3_ENVIRONMENT, needs_deepspeed, run_ranks
from rank_work import settle_groups, train_on_mongo
from tiny_model import run_config, write_tiny_model

ZERO3_CONFIG = Path(__file__).parents[2] / "assets" / "deepspeed_zero3.yml"
FSDP2_CONFIG = Path(__file__).parents[2] / "assets" / "fsdp2_dst.yml"
LAUNCH_TIMEOUT_S = 110.0
CHILD_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
}


def ranks_config(base: Path, start: Path, *, max_steps: int, layout: str = "linear") -> RunConfig:
    return run_config(
        base,
        model_dir=start,
        algo={"tasks_per_step": 2, "max_staleness": 9},
        # AdamW scales a gradient that is 0 up to rounding like any other: a small rate keeps that noise small.
        train={
            "max_steps": max_steps,
            "save_steps": 2,
            "max_tokens": 48,
            "learning_rate": 1e-4,
            "sequence_layout": layout,
        },
        loss={"aggregation": "seq_mean_token_mean"},
    )


def launch_two_ranks(
    config: RunConfig, uri: str, database: str, *, port: int, accelerate_config: Path = FSDP2_CONFIG
) -> None:
    spec = {"config": config.model_dump(mode="json"), "uri": uri, "database": database, "kill_at": None}
    path = config.run.output_dir / "spec.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(spec))
    arguments = ["--config_file", str(accelerate_config), "--num_processes", "2", "--main_process_port", str(port)]
    process = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", *arguments, trainer_process.__file__, str(path)],
        env={**os.environ, **CHILD_ENVIRONMENT},
        capture_output=True,
        timeout=LAUNCH_TIMEOUT_S,
        check=False,
    )
    assert process.returncode == 0, process.stderr.decode()[-4000:]


def optimizer_shards(checkpoint: Path) -> set[int]:
    """Into how many pieces, by rank, the optimizer state of the attention weights was written."""
    entries = FileSystemReader(checkpoint / "optimizer").read_metadata().state_dict_metadata
    names = [name for name in entries if name.endswith("q_proj.weight.exp_avg")]
    assert names
    return {len(entries[name].chunks) for name in names}


def read_metrics(config: RunConfig) -> list[dict[str, float]]:
    return [json.loads(line) for line in (config.run.run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.timeout(300)
def test_two_sharded_ranks_with_trees_make_the_steps_of_one_process_with_rows_also_after_a_resume(
    tmp_path: Path, mongo_uri: str, database_name: str, free_port: int
) -> None:
    torch.set_num_threads(1)
    start = write_tiny_model(tmp_path / "start")
    for suffix in ("_one", "_two"):
        asyncio.run(settle_groups(mongo_uri, database_name + suffix, 8))
    alone = ranks_config(tmp_path / "one", start, max_steps=4)
    train(
        alone,
        open_store=trainer_process.mongo_opener(mongo_uri, database_name + "_one"),
        sinks=trainer_process.jsonl_sinks(alone),
    )

    for max_steps in (2, 4):
        sharded = ranks_config(tmp_path / "two", start, max_steps=max_steps, layout="tree")
        launch_two_ranks(sharded, mongo_uri, database_name + "_two", port=free_port)

    assert optimizer_shards(sharded.run.run_dir / "checkpoints" / "step_2") == {2}
    for version in (2, 4):
        expected = load_file(alone.run.run_dir / "policy" / f"v{version}" / "model.safetensors")
        weights = load_file(sharded.run.run_dir / "policy" / f"v{version}" / "model.safetensors")
        assert expected.keys() == weights.keys(), "a tied embedding is stored once"
        largest = max((weights[name] - weight).abs().max().item() for name, weight in expected.items())
        assert largest <= 1e-6, f"version {version}"
    for one, two in zip(read_metrics(alone), read_metrics(sharded), strict=True):
        assert two["num_input_tokens"] < one["num_input_tokens"]
        shared = [name for name in one if not name.startswith("seconds_") and name != "num_input_tokens"]
        assert {name: two[name] for name in shared} == pytest.approx(
            {name: one[name] for name in shared}, rel=1e-5, abs=1e-6
        )
    loaded = AutoModelForCausalLM.from_pretrained(sharded.run.run_dir / "final")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("settings", "environment"),
    [
        pytest.param({}, FSDP2_ENVIRONMENT, id="FSDP2"),
        pytest.param({"tp_size": 2}, FSDP2_ENVIRONMENT, id="tensor parallel"),
        pytest.param({}, ZERO3_ENVIRONMENT, id="ZeRO-3", marks=needs_deepspeed),
    ],
)
def test_bfloat16_ranks_keep_float32_masters_and_float32_log_probs(
    tmp_path: Path,
    mongo_uri: str,
    database_name: str,
    free_port: int,
    settings: dict[str, int],
    environment: dict[str, str],
) -> None:
    torch.set_num_threads(1)
    start = write_tiny_model(tmp_path / "start", num_key_value_heads=2)
    for suffix in ("_one", "_two"):
        asyncio.run(settle_groups(mongo_uri, database_name + suffix, 2))
    alone = ranks_config(tmp_path / "one", start, max_steps=1)
    train(
        alone,
        open_store=trainer_process.mongo_opener(mongo_uri, database_name + "_one"),
        sinks=trainer_process.jsonl_sinks(alone),
    )

    sharded = ranks_config(tmp_path / "two", start, max_steps=1, layout="linear" if "tp_size" in settings else "tree")
    sharded = sharded.model_copy(
        update={
            "model": sharded.model.model_copy(update={"bf16": True}),
            "train": sharded.train.model_copy(update=settings),
        }
    )
    run_ranks(
        train_on_mongo,
        sharded.model_dump(mode="json"),
        mongo_uri,
        database_name + "_two",
        num_ranks=2,
        port=free_port,
        scratch=tmp_path / "ranks",
        environment=environment,
    )

    (one,), (two,) = read_metrics(alone), read_metrics(sharded)
    # Log-probs near -4 rounded to bfloat16 would be off by up to 8e-3.
    assert two["entropy"] == pytest.approx(one["entropy"], abs=5e-4)
    assert two["logprob_mean"] == pytest.approx(one["logprob_mean"], abs=1e-3)
    assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=5e-3)
    served = load_file(sharded.run.run_dir / "policy" / "v1" / "model.safetensors")
    masters = load_file(sharded.run.run_dir / "checkpoints" / "step_1" / "model.safetensors")
    assert {weight.dtype for weight in served.values()} == {torch.bfloat16}
    assert {weight.dtype for weight in masters.values()} == {torch.float32}


@needs_deepspeed
@pytest.mark.timeout(300)
def test_ranks_launched_for_deepspeed_make_the_steps_of_one_process(
    tmp_path: Path, mongo_uri: str, database_name: str, free_port: int
) -> None:
    torch.set_num_threads(1)
    start = write_tiny_model(tmp_path / "start")
    for suffix in ("_one", "_two"):
        asyncio.run(settle_groups(mongo_uri, database_name + suffix, 4))
    alone = ranks_config(tmp_path / "one", start, max_steps=2)
    train(
        alone,
        open_store=trainer_process.mongo_opener(mongo_uri, database_name + "_one"),
        sinks=trainer_process.jsonl_sinks(alone),
    )

    sharded = ranks_config(tmp_path / "two", start, max_steps=2)
    launch_two_ranks(sharded, mongo_uri, database_name + "_two", port=free_port, accelerate_config=ZERO3_CONFIG)

    assert (sharded.run.run_dir / "checkpoints" / "step_2" / "optimizer" / "zero3.safetensors").is_file()
    expected, weights = (load_file(config.run.run_dir / "final" / "model.safetensors") for config in (alone, sharded))
    assert max((weights[name] - weight).abs().max().item() for name, weight in expected.items()) <= 1e-6
