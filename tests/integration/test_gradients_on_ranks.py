"""L1: the gradient of a step is the same on one process and on any arrangement of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gloo_ranks import FSDP2_ENVIRONMENT, ZERO3_ENVIRONMENT, needs_deepspeed, run_ranks
from rank_work import refuse_a_bad_gradient, write_gradient
from tiny_model import run_config, write_tiny_model

OFFLOADED = {**FSDP2_ENVIRONMENT, "FSDP_OFFLOAD_PARAMS": "true"}
ZERO3_OFFLOADED = {**ZERO3_ENVIRONMENT, "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}
# number of ranks, settings, what the launcher says, into how many pieces the weights are split
ARRANGEMENTS: dict[str, tuple[int, dict[str, Any], dict[str, str], int]] = {
    "data 2": (2, {}, FSDP2_ENVIRONMENT, 2),
    "data 4": (4, {}, FSDP2_ENVIRONMENT, 4),
    "data 2 without sharding": (2, {}, {}, 1),
    "data 2, parameters in CPU memory": (2, {}, OFFLOADED, 2),
    "tensor 2": (2, {"tp_size": 2}, {}, 2),
    "context 2": (2, {"cp_size": 2}, FSDP2_ENVIRONMENT, 2),
    "context 4": (4, {"cp_size": 4}, FSDP2_ENVIRONMENT, 4),
    "data 2 x tensor 2": (4, {"tp_size": 2}, FSDP2_ENVIRONMENT, 4),
    "data 2 x context 2": (4, {"cp_size": 2}, {}, 1),
    "context 2 x tensor 2": (4, {"cp_size": 2, "tp_size": 2}, FSDP2_ENVIRONMENT, 4),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "loss": {"loss": "GSPO", "epsilon": 0.1, "aggregation": "seq_mean_token_mean", "entropy_coef": 0.01, "kl_coef": 0.1}
}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "start", num_key_value_heads=2)


def gradient_on(
    num_ranks: int, base: Path, start: Path, *, port: int, environment: dict[str, str], **sections: dict[str, Any]
) -> dict[str, torch.Tensor]:
    train = {"max_tokens": 48, **sections.pop("train", {})}
    config = run_config(base, model_dir=start, train=train, **sections)
    values = config.model_dump(mode="json")
    path = base / "gradient.safetensors"
    run_ranks(
        write_gradient, values, path, num_ranks=num_ranks, port=port, scratch=base / "ranks", environment=environment
    )
    return load_file(path)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, start: Path) -> dict[str, torch.Tensor]:
    return gradient_on(1, tmp_path_factory.mktemp("alone"), start, port=1, environment={}, **SETTINGS)


@pytest.mark.parametrize(
    "arrangement",
    [
        *(pytest.param(arrangement, id=name) for name, arrangement in ARRANGEMENTS.items()),
        pytest.param((2, {}, ZERO3_ENVIRONMENT, 2), id="ZeRO-3 on 2", marks=needs_deepspeed),
        pytest.param((4, {}, ZERO3_ENVIRONMENT, 4), id="ZeRO-3 on 4", marks=needs_deepspeed),
        pytest.param((2, {}, ZERO3_OFFLOADED, 2), id="ZeRO-3, optimizer in CPU memory", marks=needs_deepspeed),
    ],
)
def test_an_arrangement_of_ranks_has_the_gradient_and_the_numbers_of_one_process(
    tmp_path: Path,
    start: Path,
    alone: dict[str, torch.Tensor],
    free_port: int,
    arrangement: tuple[int, dict[str, Any], dict[str, str], int],
) -> None:
    num_ranks, train, environment, num_pieces = arrangement

    found = gradient_on(num_ranks, tmp_path, start, port=free_port, environment=environment, train=train, **SETTINGS)

    assert found.keys() == alone.keys()
    assert int(found.pop("held.q_proj")) * num_pieces == int(alone["held.q_proj"])
    for name, value in found.items():
        expected = alone[name]
        if name.startswith("metric."):
            assert float(value) == pytest.approx(float(expected), rel=1e-5, abs=1e-6), name
        else:
            difference = (value - expected).norm() / expected.norm()
            assert difference < 1e-6, f"{name}: {difference:g}"


@pytest.mark.parametrize("train", [{}, {"tp_size": 2}, {"cp_size": 2}], ids=["data", "tensor", "context"])
@pytest.mark.parametrize("saving", ["gradient_checkpointing", "activation_offloading"])
def test_activations_that_are_not_kept_change_no_gradient_on_two_ranks(
    tmp_path: Path,
    start: Path,
    alone: dict[str, torch.Tensor],
    free_port: int,
    saving: str,
    train: dict[str, Any],
) -> None:
    model = {saving: True}

    found = gradient_on(
        2, tmp_path, start, port=free_port, environment=FSDP2_ENVIRONMENT, train=train, model=model, **SETTINGS
    )

    for name, expected in alone.items():
        if not name.startswith(("metric.", "held.")):
            difference = (found[name] - expected).norm() / expected.norm()
            assert difference < 1e-6, f"{name}: {difference:g}"


@pytest.mark.parametrize(
    ("train", "environment"),
    [
        pytest.param({}, FSDP2_ENVIRONMENT, id="data"),
        pytest.param({"tp_size": 2}, FSDP2_ENVIRONMENT, id="tensor"),
        pytest.param({"cp_size": 2}, FSDP2_ENVIRONMENT, id="context"),
        pytest.param({}, ZERO3_ENVIRONMENT, id="ZeRO-3", marks=needs_deepspeed),
    ],
)
def test_a_gradient_that_overflows_on_one_rank_changes_no_weight_on_any(
    tmp_path: Path, start: Path, free_port: int, train: dict[str, Any], environment: dict[str, str]
) -> None:
    config = run_config(tmp_path, model_dir=start, train={"max_tokens": 48, **train})

    run_ranks(
        refuse_a_bad_gradient,
        config.model_dump(mode="json"),
        num_ranks=2,
        port=free_port,
        scratch=tmp_path / "ranks",
        environment=environment,
    )
