"""LoRA (arXiv 2106.09685) through peft: the trainer updates small factors beside frozen weights.

    start model  W, frozen, never written again       what engines load   W + alpha / rank * B A, a plain model folder
    adapter      A (random), B (zero), trained        checkpoint, export  A and B alone, a folder peft loads

peft puts the factors into the model's own layers, so the model keeps its class: log-probs, sharding and export work as
for full training. The merge is done on the gathered weights: those of a sharded layer are not there in one piece.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from agentrl.config.model_section import ModelConfig
from agentrl.errors import ConfigError, UnavailableError

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
ALL_LINEAR = "all-linear"
_ADAPTER = "default"  # peft's name of the one adapter in the model
_BASE = ".base_layer"
_PEFT_PREFIX = "base_model.model."  # what peft puts before every name in its files


def add_adapter(causal_lm: Any, *, config: ModelConfig) -> None:
    """Freeze the model and put an adapter of `lora_rank` beside its target layers, in place. It starts as no change.

    Raises ConfigError where `lora_target_modules` names no layer of the model.
    """
    targets = [name.strip() for name in config.lora_target_modules.split(",") if name.strip()]
    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=lora_alpha(config),
        target_modules=ALL_LINEAR if targets == [ALL_LINEAR] else targets,
        base_model_name_or_path=str(config.model_name_or_path),
        task_type="CAUSAL_LM",
    )
    try:
        inject_adapter_in_model(lora, causal_lm, adapter_name=_ADAPTER)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"lora_target_modules = {config.lora_target_modules}: {reason}") from error
    _refuse_embeddings(causal_lm, config=config)


def _refuse_embeddings(causal_lm: Any, *, config: ModelConfig) -> None:
    """Log-probs take embedding and head as they are: an adapter there would be neither trained nor served."""
    ends = {id(module) for module in (causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings())}
    adapted = [name for name, module in causal_lm.named_modules() if id(module) in ends and hasattr(module, "lora_A")]
    if adapted:
        raise ConfigError(
            f"lora_target_modules = {config.lora_target_modules}: {adapted[0]} is the model's embedding or head, which "
            "cannot have an adapter here; name layers between them"
        )


def lora_alpha(config: ModelConfig) -> float:
    """The given alpha, else twice the rank."""
    return 2.0 * config.lora_rank if config.lora_alpha is None else config.lora_alpha


def merged_state(state: Mapping[str, torch.Tensor], *, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Full weights of the adapted model as weights of the plain one: factors added in, names as without an adapter."""
    scale = lora_alpha(config) / config.lora_rank
    merged = {}
    for name, weight in state.items():
        if is_adapter(name):
            continue
        plain = name.replace(_BASE, "")
        down = state.get(name.replace(f"{_BASE}.weight", f".lora_A.{_ADAPTER}.weight"))
        up = state.get(name.replace(f"{_BASE}.weight", f".lora_B.{_ADAPTER}.weight"))
        is_adapted = plain != name and down is not None and up is not None
        merged[plain] = weight + scale * (up @ down) if is_adapted else weight  # type: ignore[operator]
    return merged


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to the adapter."""
    return f".lora_A.{_ADAPTER}." in name or f".lora_B.{_ADAPTER}." in name


def is_adapter_folder(directory: Path) -> bool:
    """Whether a checkpoint holds an adapter instead of a model."""
    return (directory / ADAPTER_CONFIG_FILE).is_file()


def write_adapter(directory: Path, *, causal_lm: Any, state: Mapping[str, torch.Tensor]) -> None:
    """The adapter into an existing folder, as `peft.PeftModel.from_pretrained` loads it. Rank 0 only."""
    causal_lm.peft_config[_ADAPTER].save_pretrained(directory)
    factors = {
        _PEFT_PREFIX + name.replace(f".{_ADAPTER}.", "."): tensor.contiguous()
        for name, tensor in state.items()
        if is_adapter(name)
    }
    save_file(factors, directory / ADAPTER_FILE, metadata={"format": "pt"})


def load_adapter(causal_lm: Any, directory: Path, *, config: ModelConfig) -> None:
    """Fill the adapter that `add_adapter` put into the model from a folder of `write_adapter`.

    Raises ConfigError if the folder holds no adapter or one of another shape, UnavailableError if it cannot be read.
    """
    _check_same_shape(directory, config=config)
    try:
        factors = load_file(directory / ADAPTER_FILE)
    except (OSError, SafetensorError) as error:
        raise UnavailableError(f"{directory / ADAPTER_FILE}: cannot be read: {error}") from error
    named = {
        name.removeprefix(_PEFT_PREFIX)
        .replace(".lora_A.", f".lora_A.{_ADAPTER}.")
        .replace(".lora_B.", f".lora_B.{_ADAPTER}."): tensor
        for name, tensor in factors.items()
    }
    expected = {name for name in causal_lm.state_dict() if is_adapter(name)}
    if named.keys() != expected:
        raise ConfigError(
            f"{directory}: its adapter covers {len(named)} matrices, this run's {len(expected)}: lora_target_modules "
            "was another one; set it back, or choose another run_name"
        )
    causal_lm.load_state_dict(named, strict=False)


def _check_same_shape(directory: Path, *, config: ModelConfig) -> None:
    if not is_adapter_folder(directory):
        raise ConfigError(
            f"lora_rank = {config.lora_rank}, but {directory} holds a full model: the run was trained without an "
            "adapter; set lora_rank 0, or choose another run_name"
        )
    saved = json.loads((directory / ADAPTER_CONFIG_FILE).read_text(encoding="utf-8"))
    for name, was, now in (
        ("lora_rank", saved["r"], config.lora_rank),
        ("lora_alpha", saved["lora_alpha"], lora_alpha(config)),
    ):
        if was != now:
            raise ConfigError(f"{name} = {now:g}, but the adapter in {directory} was trained with {was:g}; set it back")
