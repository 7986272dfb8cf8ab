"""Checkpoints: everything a resume needs, bitwise.

    run_dir/checkpoints/step_20/          complete: it has its name only after all ranks wrote and synced
        model.safetensors, config.json, tokenizer...   float32, loads in transformers; with LoRA the adapter alone
        optimizer/                        AdamW state, sharded (torch.distributed.checkpoint)
        rng_0.pt, rng_1.pt, ...           random generators of each rank
        checkpoint.json                   step, metrics, alarms, number of ranks, start model, size of every file
    run_dir/checkpoints/step_25.tmp/      a kill while writing leaves this; ignored, removed at the next start

A folder whose files are not all there in full (a disk that lost writes, a careless copy) is passed over with a warning;
the steps after an older checkpoint are replayed from the ledger. The step's ledger entry may still be open when a
checkpoint exists; `checkpoint.json` carries what closes it.
"""

from __future__ import annotations

import io
import json
import logging
import random
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

from agentrl.errors import ConfigError, UnavailableError
from agentrl.train.export import (
    UNFINISHED_SUFFIX,
    adapter_state,
    finish_directory,
    model_state,
    unwrapped,
    write_model,
    writing_into,
)
from agentrl.train.lora import write_adapter
from agentrl.train.zero3 import is_engine, load_optimizer, save_optimizer
from agentrl.types import Alarm

log = logging.getLogger(__name__)

STATE_FILE = "checkpoint.json"
OPTIMIZER_DIR = "optimizer"
SHARDED_METADATA = ".metadata"  # torch.distributed.checkpoint's
_STEP_NAME = re.compile(r"step_(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int
    metrics: Mapping[str, float]
    num_processes: int
    start_fingerprint: str | None  # of the start model's weights; None in checkpoints of an earlier release
    alarms: tuple[Alarm, ...] = ()


def newest_checkpoint(checkpoints_dir: Path) -> Checkpoint | None:
    """The intact checkpoint of the highest step; None if there never was one. Raises ConfigError if all are damaged."""
    damages = []
    for _, path in sorted(_by_step(checkpoints_dir).items(), reverse=True):
        damage = _damage(path)
        if damage is None:
            return _read_state(path)
        log.warning("checkpoint %s is damaged and passed over: %s", path, damage)
        damages.append(f"{path.name}: {damage}")
    if damages:
        raise ConfigError(
            f"no checkpoint in {checkpoints_dir} is intact ({'; '.join(damages)}); restore one, or move the folder "
            "away to replay the whole ledger from the start model"
        )
    return None


def checkpoint_path(checkpoints_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step lies, once it is complete."""
    return checkpoints_dir / f"step_{step}"


def save_checkpoint(
    path: Path,
    *,
    accelerator: Accelerator,
    policy: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    tokenizer_source: Path,
    start_fingerprint: str,
    step: int,
    metrics: Mapping[str, float],
    alarms: Sequence[Alarm] = (),
) -> None:
    """Write one checkpoint. Every rank must call it; it exists when this returns.

    Raises OSError naming the folder where it cannot be written.
    """
    unfinished = path.with_name(path.name + UNFINISHED_SUFFIX)
    with writing_into(path):
        if accelerator.is_main_process:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        accelerator.wait_for_everyone()
        write_weights(unfinished, accelerator=accelerator, policy=policy, tokenizer_source=tokenizer_source)
        _save_optimizer(unfinished / OPTIMIZER_DIR, policy=policy, optimizer=optimizer)
        _save_random_state(unfinished / f"rng_{accelerator.process_index}.pt")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            sizes = {str(f.relative_to(unfinished)): f.stat().st_size for f in unfinished.rglob("*") if f.is_file()}
            contents = {
                "step": step,
                "metrics": dict(metrics),
                "alarms": [asdict(alarm) for alarm in alarms],
                "num_processes": accelerator.num_processes,
                "start_fingerprint": start_fingerprint,
                "sizes": sizes,
            }
            (unfinished / STATE_FILE).write_text(json.dumps(contents), encoding="utf-8")
            finish_directory(path)
    accelerator.wait_for_everyone()


def write_weights(
    directory: Path, *, accelerator: Accelerator, policy: torch.nn.Module, tokenizer_source: Path
) -> None:
    """What is trained, as rank 0 has to find it again: the whole model, or with LoRA the adapter alone."""
    causal_lm = unwrapped(accelerator, policy).causal_lm
    if unwrapped(accelerator, policy).has_adapter:
        factors = adapter_state(accelerator, policy)
        if accelerator.is_main_process:
            write_adapter(directory, causal_lm=causal_lm, state=factors)
        return
    state = model_state(accelerator, policy)
    if accelerator.is_main_process:
        write_model(directory, causal_lm=causal_lm, state=state, tokenizer_source=tokenizer_source)


def load_training_state(
    checkpoint: Checkpoint, *, accelerator: Accelerator, policy: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Restore optimizer and random generators; the weights come from loading the checkpoint as a model.

    With another number of ranks the optimizer state is resharded and the random generators are left as seeded. Raises
    UnavailableError where what is stored cannot be read.
    """
    with readable(checkpoint, what="optimizer state"):
        _load_optimizer(checkpoint.path / OPTIMIZER_DIR, policy=policy, optimizer=optimizer)
    if checkpoint.num_processes == accelerator.num_processes:
        with readable(checkpoint, what="random generators"):
            state = torch.load(checkpoint.path / f"rng_{accelerator.process_index}.pt", weights_only=True)
        _restore_random_state(state)
    else:
        log.warning(
            "checkpoint %s was written by %d ranks, now there are %d: random generators start from the seed",
            checkpoint.path,
            checkpoint.num_processes,
            accelerator.num_processes,
        )


@contextmanager
def readable(checkpoint: Checkpoint, *, what: str) -> Iterator[None]:
    """Whatever reading a part of a checkpoint raises becomes an UnavailableError that says what to do."""
    try:
        yield
    except (ConfigError, MemoryError, torch.OutOfMemoryError):
        raise
    except (Exception, CheckpointException) as error:  # damaged bytes: libraries raise whatever comes of them
        first_line = str(error).strip().partition("\n")[0]
        raise UnavailableError(
            f"checkpoint {checkpoint.path}: its {what} cannot be read ({type(error).__name__}: {first_line}); move the "
            "folder away: the checkpoint before it is taken, and the steps since then are replayed from the ledger"
        ) from error


def prune_checkpoints(checkpoints_dir: Path, *, keep: int) -> None:
    """Delete all but the newest `keep` intact checkpoints. Damaged ones are left: a replay writes them anew."""
    found = {step: path for step, path in _by_step(checkpoints_dir).items() if _damage(path) is None}
    for step in sorted(found)[:-keep]:
        shutil.rmtree(found[step])


def _alarm(stored: Mapping[str, Any]) -> Alarm:
    return Alarm(**{**stored, "steps": tuple(stored["steps"]), "subjects": tuple(stored["subjects"])})


def _by_step(checkpoints_dir: Path) -> dict[int, Path]:
    if not checkpoints_dir.is_dir():
        return {}
    named = ((_STEP_NAME.fullmatch(path.name), path) for path in checkpoints_dir.iterdir())
    return {int(match.group(1)): path for match, path in named if match and (path / STATE_FILE).is_file()}


def _read_state(path: Path) -> Checkpoint:
    """What `checkpoint.json` says. Raises whatever reading and converting raises where it is damaged or not ours."""
    state = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
    checkpoint = Checkpoint(
        path=path,
        step=int(state["step"]),
        metrics={str(name): float(value) for name, value in dict(state["metrics"]).items()},
        num_processes=int(state["num_processes"]),
        start_fingerprint=state.get("start_fingerprint"),
        alarms=tuple(_alarm(alarm) for alarm in state.get("alarms", ())),
    )
    if checkpoint_path(path.parent, checkpoint.step) != path:
        raise ValueError(f"it is of step {checkpoint.step}")
    return checkpoint


def _damage(path: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None. Content is not read: it may be many gigabytes."""
    try:
        _read_state(path)
        sizes = dict(json.loads((path / STATE_FILE).read_text(encoding="utf-8")).get("sizes", {}))
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        return f"{STATE_FILE} cannot be used ({error or type(error).__name__})"
    for name, size in sizes.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
    return None


def _load_optimizer(directory: Path, *, policy: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if is_engine(policy):
        load_optimizer(policy, directory)
        return
    if not (directory / SHARDED_METADATA).is_file():
        raise ConfigError(f"{directory}: the state is DeepSpeed's; go on with assets/deepspeed_zero3.yml")
    state = {"optimizer": get_optimizer_state_dict(policy, _bare(optimizer))}
    with _quiet_single_process():
        load_sharded(state, checkpoint_id=directory)
    set_optimizer_state_dict(policy, _bare(optimizer), optim_state_dict=state["optimizer"])


def _save_optimizer(directory: Path, *, policy: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if is_engine(policy):
        save_optimizer(policy, directory)
        return
    state = {"optimizer": get_optimizer_state_dict(policy, _bare(optimizer))}
    with _quiet_single_process():
        save_sharded(state, checkpoint_id=directory)


def _bare(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The torch optimizer inside Accelerate's wrapper."""
    inner: Any = optimizer
    return inner.optimizer  # type: ignore[no-any-return]  # Accelerate is not typed


def _quiet_single_process() -> Any:
    """Without a process group, torch.distributed.checkpoint warns that it assumes one process; that is meant."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)


def _save_random_state(path: Path) -> None:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    state = {"torch": torch.get_rng_state(), "cuda": cuda, "python": random.getstate()}
    serialised = io.BytesIO()  # torch hides why it could not write to a file
    torch.save(state, serialised)
    path.write_bytes(serialised.getvalue())


def _restore_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
