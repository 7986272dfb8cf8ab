"""L4 over ranks: a checkpoint does not depend on how many ranks wrote it, nor on what each of them held."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agentrl.config.sections import RunConfig
from gloo_ranks import FSDP2_ENVIRONMENT, ZERO3_ENVIRONMENT, needs_deepspeed, run_ranks
from rank_work import settle_groups, train_on_mongo
from tiny_model import run_config, write_tiny_model


@dataclass(frozen=True, kw_only=True)
class Ranks:
    count: int
    train: dict[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=lambda: FSDP2_ENVIRONMENT)


ONE, TWO, FOUR = Ranks(count=1, environment={}), Ranks(count=2), Ranks(count=4)
TENSOR_TWO = Ranks(count=2, train={"tp_size": 2})
TENSOR_FOUR = Ranks(count=4, train={"tp_size": 2})
CONTEXT_TWO = Ranks(count=2, train={"cp_size": 2})
LORA = {"lora_rank": 4}
ZERO_TWO, ZERO_FOUR = (Ranks(count=count, environment=ZERO3_ENVIRONMENT) for count in (2, 4))
CHANGES: dict[str, tuple[Ranks, Ranks, dict[str, Any]]] = {
    "2 to 1": (TWO, ONE, {}),
    "2 to 4": (TWO, FOUR, {}),
    "tensor 2 to data 2": (TENSOR_TWO, TWO, {}),
    "2 to data 2 x tensor 2": (TWO, TENSOR_FOUR, {}),
    "context 2 to 1": (CONTEXT_TWO, ONE, {}),
    "LoRA, 2 to 1": (TWO, ONE, LORA),
    "LoRA, 1 to context 2": (ONE, CONTEXT_TWO, LORA),
}


NUM_ROUNDED = 8
"""Of 26,336 weights. A gradient near AdamW's epsilon (1e-8), where the median is 1e-3, is mostly rounding, and AdamW
divides it by itself: such a weight moves by up to 1 % of the learning rate more or less. Adding gradients up in float64
does not help, because the rounding is within one pass."""


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "start", num_key_value_heads=2)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a run keeps its files and rows."""

    base: Path
    start: Path
    uri: str
    database: str
    port: int


def run_on(ranks: Ranks, place: Place, *, max_steps: int, model: dict[str, Any]) -> RunConfig:
    train = {"max_steps": max_steps, "save_steps": 2, "max_tokens": 48, "learning_rate": 1e-4, **ranks.train}
    config = run_config(
        place.base, model_dir=place.start, train=train, model=model, algo={"tasks_per_step": 2, "max_staleness": 9}
    )
    run_ranks(
        train_on_mongo,
        config.model_dump(mode="json"),
        place.uri,
        place.database,
        num_ranks=ranks.count,
        port=place.port,
        scratch=place.base / "ranks",
        environment=ranks.environment,
    )
    return config


@pytest.mark.parametrize(
    "change",
    [
        *(pytest.param(change, id=name) for name, change in CHANGES.items()),
        pytest.param((ZERO_TWO, ZERO_FOUR, {}), id="ZeRO-3, 2 to 4", marks=needs_deepspeed),
        pytest.param((ZERO_TWO, ZERO_TWO, LORA), id="ZeRO-3, LoRA", marks=needs_deepspeed),
    ],
)
def test_a_run_goes_on_with_other_ranks(
    tmp_path: Path,
    start: Path,
    mongo_uri: str,
    database_name: str,
    free_port: int,
    change: tuple[Ranks, Ranks, dict[str, Any]],
) -> None:
    before, after, model = change
    places = {}
    for name in ("steady", "changed"):
        places[name] = Place(
            base=tmp_path / name, start=start, uri=mongo_uri, database=f"{database_name}_{name}", port=free_port
        )
        asyncio.run(settle_groups(mongo_uri, places[name].database, 8))

    steady = run_on(ONE, places["steady"], max_steps=4, model=model)
    run_on(before, places["changed"], max_steps=2, model=model)
    changed = run_on(after, places["changed"], max_steps=4, model=model)

    for version in (2, 4):
        expected = load_file(steady.run.run_dir / "policy" / f"v{version}" / "model.safetensors")
        weights = load_file(changed.run.run_dir / "policy" / f"v{version}" / "model.safetensors")
        assert expected.keys() == weights.keys(), "a tied embedding is stored once"
        differences = torch.cat([(weights[name] - weight).abs().flatten() for name, weight in expected.items()])
        assert differences.max() <= 2e-6, f"version {version}: {differences.max():g}"
        assert (differences > 1e-7).sum() <= NUM_ROUNDED, f"version {version}: {differences.sort().values[-20:]}"
    first, last = (AutoModelForCausalLM.from_pretrained(changed.run.run_dir / "policy" / f"v{v}") for v in (0, 4))
    assert last.lm_head.weight is last.model.embed_tokens.weight
    name = "model.layers.1.self_attn.q_proj.weight"
    moved = (first.state_dict()[name] - last.state_dict()[name]).abs().max()
    assert moved > 1e-5, "the steps were made"
    assert torch.isfinite(moved)
