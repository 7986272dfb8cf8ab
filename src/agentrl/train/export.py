"""Model directories on disk: complete or not there at all.

Everything the trainer writes for others (policies, checkpoints, the final model) is a folder in `save_pretrained` form,
written beside its name (`<name>.tmp`), synced and renamed. Who sees the name sees all of it, after a kill too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from agentrl.train.lora import is_adapter
from agentrl.train.model import PolicyModule
from agentrl.train.zero3 import is_partitioned, whole_parameter

UNFINISHED_SUFFIX = ".tmp"
MODULE_PREFIX = "causal_lm."
TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates",
    "spiece.model",
    "sentencepiece*",
)


@contextmanager
def writing_into(directory: Path) -> Iterator[None]:
    """What libraries raise for a full disk, or a folder they cannot write, becomes an OSError that names the folder."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
        number = _error_number(error)
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(directory)) from error


def _error_number(error: BaseException) -> int | None:
    """The operating system's reason inside whatever was raised."""
    if isinstance(error, OSError):
        return error.errno
    if isinstance(error, CheckpointException):
        causes = [failure for failure, _ in error.failures.values()]
    elif found := re.search(r"os error (\d+)", str(error)):  # how Rust's libraries put it
        return int(found[1])
    else:
        causes = [cause for cause in (error.__cause__, error.__context__) if cause is not None]
    return next((number for cause in causes if (number := _error_number(cause)) is not None), None)


@contextmanager
def written_beside(directory: Path) -> Iterator[Path]:
    """Yield a fresh folder beside `directory`; on success sync it and rename it, replacing what was there.

    Raises OSError naming the folder where it cannot be written.
    """
    unfinished = directory.with_name(directory.name + UNFINISHED_SUFFIX)
    with writing_into(directory):
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        yield unfinished
        finish_directory(directory)


def finish_directory(directory: Path) -> None:
    """Sync `<directory>.tmp` and give it its name."""
    unfinished = directory.with_name(directory.name + UNFINISHED_SUFFIX)
    for path in [*unfinished.rglob("*"), unfinished]:
        _sync(path)
    if directory.exists():
        shutil.rmtree(directory)
    unfinished.rename(directory)
    _sync(directory.parent)


def remove_unfinished(parent: Path) -> None:
    """Delete what a killed process left half-written in a folder."""
    for leftover in parent.glob(f"*{UNFINISHED_SUFFIX}"):
        shutil.rmtree(leftover)


def is_whole_model(directory: Path) -> bool:
    """Whether a model directory is there with all its weights: a safetensors header tells how long its file must be."""
    index = directory / "model.safetensors.index.json"
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
        for name in names:
            with safe_open(directory / name, framework="pt"):
                pass
    except (OSError, ValueError, KeyError, SafetensorError):
        return False
    return (directory / "config.json").is_file()


def model_state(accelerator: Accelerator, policy: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Full weights by Hugging Face name, float32. Every rank must call it; only rank 0 gets the result."""
    causal_lm = unwrapped(accelerator, policy).causal_lm
    # named_parameters gives a tied weight one name; the state dict has it under both.
    names = {name for name, _ in [*causal_lm.named_parameters(), *causal_lm.named_buffers()]}
    return _gathered(accelerator, policy, names=names)


def adapter_state(accelerator: Accelerator, policy: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The factors of a LoRA adapter alone. Every rank must call it; only rank 0 gets the result."""
    names = {name for name, _ in unwrapped(accelerator, policy).causal_lm.named_parameters() if is_adapter(name)}
    return _gathered(accelerator, policy, names=names)


def _gathered(accelerator: Accelerator, policy: torch.nn.Module, *, names: Set[str]) -> dict[str, torch.Tensor]:
    """One tensor after the other in one piece on rank 0's CPU; no rank ever holds the whole model on its device."""
    gathered = {}
    parameters = dict(unwrapped(accelerator, policy).named_parameters())
    for full_name, tensor in unwrapped(accelerator, policy).state_dict().items():
        name = full_name.removeprefix(MODULE_PREFIX)
        if name not in names:
            continue
        whole = _in_one_piece(parameters.get(full_name, tensor), tensor, device=accelerator.device)
        if accelerator.is_main_process:
            gathered[name] = whole.detach().cpu()
    return gathered


def _in_one_piece(parameter: torch.Tensor, tensor: torch.Tensor, *, device: torch.device) -> torch.Tensor:
    """`tensor`, the state dict's entry of `parameter`, gathered from the ranks. Every rank must call it."""
    if is_partitioned(parameter):
        return whole_parameter(parameter)
    on_device = tensor.to(device)  # where collectives work; CPU offload keeps shards elsewhere
    return on_device.full_tensor() if isinstance(on_device, DTensor) else on_device


def unwrapped(accelerator: Accelerator, policy: torch.nn.Module) -> PolicyModule:
    """The PolicyModule inside whatever Accelerate wrapped around it."""
    module: Any = accelerator.unwrap_model(policy)
    if not isinstance(module, PolicyModule):
        raise TypeError(f"expected a PolicyModule, got {type(module).__name__}")
    return module


def write_model(directory: Path, *, causal_lm: Any, state: Mapping[str, torch.Tensor], tokenizer_source: Path) -> None:
    """Weights, config, generation config and tokenizer files into an existing folder. Rank 0 only.

    The config's dtype becomes that of the weights, so that loaders with `dtype="auto"` keep it.
    """
    causal_lm.save_pretrained(directory, state_dict=dict(state))
    dtype = next(iter(state.values())).dtype
    if dtype != causal_lm.dtype:
        config_path = directory / "config.json"
        config = json.loads(config_path.read_text(encoding="utf-8"))
        config["dtype"] = str(dtype).removeprefix("torch.")
        config_path.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
    for pattern in TOKENIZER_FILES:
        for source in tokenizer_source.glob(pattern):
            if source.is_dir():
                shutil.copytree(source, directory / source.name)
            else:
                shutil.copyfile(source, directory / source.name)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
