"""Loads a causal language model, replaces its weights in place from a `save_pretrained` directory, fingerprints them.

An update is all or nothing: names, shapes and readability of every tensor are checked before the first one is written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from agentrl.errors import UnavailableError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class WeightsError(Exception):
    """A weight directory does not fit the model; nothing was changed."""


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model directory. Raises WeightsError if there are none or one is missing."""
    index = directory / _INDEX
    if index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = [directory / name for name in sorted(set(weight_map.values()))]
    else:
        files = [directory / _SINGLE]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise WeightsError(f"{directory} has no {', '.join(missing)}: it is not a complete save_pretrained directory")
    return files


def load_model(directory: Path, *, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """The model in evaluation mode. Raises UnavailableError naming what the directory lacks."""
    if not (directory / "config.json").is_file():
        raise UnavailableError(f"model_name_or_path = {directory}: there is no config.json; give a model directory")
    try:
        weight_files(directory)
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            directory, config=config, local_files_only=True, dtype=dtype, attn_implementation="sdpa"
        )
    except (WeightsError, OSError, ValueError, SafetensorError) as error:
        raise UnavailableError(f"model_name_or_path = {directory}: cannot load the model: {error}") from error
    except RuntimeError as error:  # what transformers raises for tensors of other shapes
        message = f"model_name_or_path = {directory}: its weights do not fit its config.json"
        raise UnavailableError(message) from error
    model.requires_grad_(requires_grad=False)
    return model.to(device).eval()


def read_weights(model: nn.Module, directory: Path) -> Mapping[str, torch.Tensor]:
    """Read and check every tensor of a weight directory against `model`, without touching it.

    Tied parameters may be stored once. Raises WeightsError naming the first tensors that do not fit.
    """
    state = model.state_dict()
    tensors: dict[str, torch.Tensor] = {}
    try:
        for file in weight_files(directory):
            with safe_open(file, framework="pt") as reader:
                tensors.update({name: reader.get_tensor(name) for name in reader.keys()})  # noqa: SIM118  # no mapping
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise WeightsError(f"{directory}: cannot read weights: {error}") from error
    unknown = sorted(set(tensors) - set(state))
    if unknown:
        raise WeightsError(f"{directory}: {len(unknown)} tensors the model does not have: {', '.join(unknown[:3])}")
    given = {state[name].data_ptr() for name in tensors}
    missing = sorted(name for name, value in state.items() if value.data_ptr() not in given)
    if missing:
        raise WeightsError(f"{directory}: {len(missing)} tensors are missing: {', '.join(missing[:3])}")
    for name, tensor in tensors.items():
        if tensor.shape != state[name].shape:
            raise WeightsError(
                f"{directory}: {name} has shape {list(tensor.shape)}, the model {list(state[name].shape)}"
            )
    return tensors


@torch.no_grad()
def apply_weights(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write checked tensors into the existing parameters."""
    state = model.state_dict()
    for name, tensor in tensors.items():
        state[name].copy_(tensor)


def checksums(model: nn.Module) -> dict[str, str]:
    """Name -> SHA-256 of the bytes of every parameter and buffer."""
    return {
        name: hashlib.sha256(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, value in model.state_dict().items()
    }
