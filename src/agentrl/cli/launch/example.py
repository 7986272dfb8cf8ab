"""The set-up of the examples: tasks and a weak start model, both made on this machine and kept for the next run.

    train_file, eval_file of the profile       the example's generator in assets/laptop
    data/models/laptop-<key>/                  the example's builder there: random weights and demonstrations
                                               ─► demonstrations into a database of their own
                                               ─► the ordinary trainer on them (assets/profiles/*_start.yml)

The key is a hash of everything the model depends on, the seed included. The folder appears by a rename when complete; a
set-up that was interrupted continues from its last checkpoint.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Coroutine
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.status import Status
from rich.text import Text

from agentrl.cli.connect import prepared_store
from agentrl.cli.examples import Example, example_of, is_made_by_profile
from agentrl.cli.launch.phase import phase
from agentrl.cli.launch.processes import Processes, log_path, write_config
from agentrl.cli.launch.supervisor import ChildSpec, Supervisor, child_environment
from agentrl.cli.progress import TRAIN_SPLIT, ProgressReader
from agentrl.cli.tasks import generate_example_tasks
from agentrl.config import RunConfig
from agentrl.config.load import ASSETS_DIR, ENVIRONMENT_PREFIX, load_config
from agentrl.protocols import TrainStore
from agentrl.tools.servers import search
from agentrl.types import DBRecordData

INSERT_ROWS = 500
REFRESH_S = 0.7
FORGET_AFTER = timedelta(minutes=1)


async def set_up_example(config: RunConfig, *, uri: str, supervisor: Supervisor, console: Console) -> RunConfig:
    """Make what the profile promises and is not there; the configuration with the start model filled in."""
    example = example_of(config)
    if example is None:
        return config
    if any(is_made_by_profile(config, name) for name in ("train_file", "eval_file")):
        with phase(console, "problems", detail="generating problems for the tool servers"):
            await asyncio.to_thread(generate_example_tasks, config)
    if config.model.model_name_or_path is not None:
        return config
    folder = config.run.data_dir / "models" / f"laptop-{start_model_key(example, seed=config.run.seed)}"
    if not folder.is_dir():
        await _build_start_model(
            config, example=example, folder=folder, uri=uri, supervisor=supervisor, console=console
        )
    return config.model_copy(update={"model": config.model.model_copy(update={"model_name_or_path": folder})})


def start_model_key(example: Example, *, seed: int) -> str:
    """Hash of all the start model is made from."""
    digest = hashlib.sha256(f"{seed} {example.builder.name}".encode())
    profile = ASSETS_DIR / "profiles" / f"{example.start_profile}.yml"
    inputs = [*example.builder.parent.rglob("*.py"), profile, Path(search.__file__).with_name("corpus.jsonl")]
    for path in sorted(inputs):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


async def _build_start_model(
    config: RunConfig, *, example: Example, folder: Path, uri: str, supervisor: Supervisor, console: Console
) -> None:
    build_dir = folder.with_name(f"{folder.name}.build")
    message = "building a start model (once, a minute or two): a tiny model learns from a flawed teacher"
    console.print(message, soft_wrap=True)
    with phase(console, "teacher", detail="random weights and demonstrations"):
        await supervisor.run_once(_builder(config, script=example.builder, build_dir=build_dir))
    start = _start_config(config, profile=example.start_profile, folder=folder, build_dir=build_dir, uri=uri)
    write_config(start)
    store = await prepared_store(start)
    try:
        with phase(console, "demos", detail=f"into database {start.run.run_name}"):
            await insert_demonstrations(store, path=build_dir / "demonstrations.jsonl")
        reader = ProgressReader(store=store, config=start, forget_after=FORGET_AFTER)
        with phase(console, "cold start", detail=f"{start.train.max_steps} steps") as status:
            training = supervisor.run_once(Processes(config=start, uri=uri, environ=os.environ).trainer())
            await _show_steps(training, reader=reader, status=status)
    finally:
        await store.close()
    (start.run.run_dir / "final").replace(folder)
    shutil.rmtree(build_dir)


def _builder(config: RunConfig, *, script: Path, build_dir: Path) -> ChildSpec:
    return ChildSpec(
        name="start model builder",
        argv=(sys.executable, str(script), "--out", str(build_dir), "--seed", str(config.run.seed)),
        environ=child_environment(os.environ, threads=1, drop_prefixes=(ENVIRONMENT_PREFIX,)),
        log_path=log_path(config, "builder", 0),
    )


def _start_config(config: RunConfig, *, profile: str, folder: Path, build_dir: Path, uri: str) -> RunConfig:
    """Supervised training on the demonstrations, in a run and database of its own."""
    flags = {
        "run_name": folder.name,
        "output_dir": build_dir,
        "log_dir": config.run.log_dir,
        "data_dir": config.run.data_dir,
        "seed": config.run.seed,
        "model_name_or_path": build_dir / "model",
        "db_connection_string": uri,
    }
    tokens = [token for name, value in flags.items() for token in (f"--{name}", str(value))]
    return load_config(profile=profile, config_file=None, environ={}, argv_flags=tokens)


async def insert_demonstrations(store: TrainStore, *, path: Path) -> None:
    """Put the builder's rows into the database; rows that are there already are left alone."""
    rows = _read_rows(path)
    for start in range(0, len(rows), INSERT_ROWS):
        await store.insert_sequences([_supervised_row(row) for row in rows[start : start + INSERT_ROWS]])


def _read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _supervised_row(row: dict[str, Any]) -> DBRecordData:
    """A row {"id", "token_ids", "weights"}: its weights are the advantages of what is imitated."""
    weights = np.asarray(row["weights"], dtype=np.float32)
    return DBRecordData(
        id=row["id"],
        task_id=row["id"],
        record_id=row["id"],
        split=TRAIN_SPLIT,
        token_ids=np.asarray(row["token_ids"], dtype=np.int32),
        loss_mask=weights > 0,
        advantages=weights,
        behaviour_logprobs=None,
        policy_versions=np.full(weights.size, -1, dtype=np.int32),
        reward=1.0,
    )


async def _show_steps(training: Coroutine[Any, Any, None], *, reader: ProgressReader, status: Status) -> None:
    """Keep the status line at the newest step until the trainer ends. Raises what ended it otherwise."""
    running = asyncio.ensure_future(training)
    try:
        while not running.done():
            progress = await reader.read()
            loss = progress.steps[-1].metrics.get("loss", 0.0) if progress.steps else 0.0
            status.update(Text(f"cold start, step {progress.step}/{progress.max_steps}, loss {loss:.3f}"))
            await asyncio.wait([running], timeout=REFRESH_S)
    finally:
        running.cancel()
    running.result()
