"""`agentrl tasks load RUN_NAME`: the task file into the run's database. `agentrl tasks generate`: the laptop tasks."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import uvloop
from rich.console import Console

from agentrl.cli.agents import check_judge_is_there
from agentrl.cli.connect import open_run_store
from agentrl.cli.examples import EXAMPLES, example_of
from agentrl.cli.invocation import Invocation
from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.protocols import TaskStore
from agentrl.rollout.dataset import TaskRow, build_tasks, load_task_rows
from agentrl.rollout.meta_sampler import check_verifiable
from agentrl.scoring import MCPScorerFactory, load_scorers

TRAIN_SPLIT = "train"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to do, and for which run."""
    parser.add_argument(
        "action", choices=("load", "generate"), help="load --train_file, or write the laptop task files"
    )
    parser.add_argument("run_name", metavar="RUN_NAME", nargs="?")


def run(invocation: Invocation) -> int:
    """Load or generate."""
    config = invocation.config
    console = Console(highlight=False, soft_wrap=True, markup=False)
    if invocation.arguments.action == "generate":
        written = generate_example_tasks(config)
        console.print(f"wrote {' and '.join(map(str, written)) or 'nothing: both files are there'}")
        return 0
    if "run_name" not in config.run.model_fields_set:
        raise ConfigError("RUN_NAME is missing: agentrl tasks load RUN_NAME --train_file tasks.jsonl")
    num_rows, num_new = uvloop.run(_load(config))
    console.print(f"{num_rows} tasks in {config.run.train_file}, {num_new} of them new in run {config.run.run_name}")
    return 0


async def enqueue_train_tasks(config: RunConfig, store: TaskStore, *, rows: Sequence[TaskRow]) -> int:
    """Enqueue the rows as epoch 0; ids already there are left alone. Returns how many are new."""
    tasks = build_tasks(rows, split=TRAIN_SPLIT, epoch=0, num_generations=config.rollout.num_generations)
    return await store.insert_tasks(tasks)


def read_task_file(config: RunConfig, name: Literal["train_file", "eval_file"]) -> list[TaskRow]:
    """The checked rows of the file the setting names. Raises DatasetError listing bad rows, ConfigError if not set."""
    path = config.run.train_file if name == "train_file" else config.run.eval_file
    if path is None:
        raise ConfigError(f"{name} is not set: give --{name} tasks.jsonl (one JSON object per line)")
    if config.rollout.scorer_module is not None:
        load_scorers(config.rollout.scorer_module)
    rows = load_task_rows(path, known_scorers=MCPScorerFactory.names())
    scorers = [row.scorer for row in rows]
    check_judge_is_there(config, scorers)
    if config.reflection.reflect_when == "wrong" and name == "train_file":  # evaluations reflect on every answer
        check_verifiable(scorers)
    return rows


def generate_example_tasks(config: RunConfig) -> list[Path]:
    """Write the example profile's train_file and eval_file where they are missing; returns what was written.

    Same seed, same files. A file that is there is left alone: it may be the user's own.
    """
    wanted = {"--train_file": config.run.train_file, "--eval_file": config.run.eval_file}
    if None in wanted.values():
        raise ConfigError("train_file and eval_file are not set: give both, or --profile laptop")
    generator = (example_of(config) or EXAMPLES["laptop"]).generator
    missing = {flag: path for flag, path in wanted.items() if path is not None and not path.is_file()}
    with tempfile.TemporaryDirectory() as folder:
        made = {flag: Path(folder) / f"{flag.lstrip('-')}.jsonl" for flag in wanted}
        files = [token for flag, path in made.items() for token in (flag, str(path))]
        subprocess.run([sys.executable, str(generator), *files, "--seed", str(config.run.seed)], check=True)
        for flag, path in missing.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(made[flag], path)
    return list(missing.values())


async def _load(config: RunConfig) -> tuple[int, int]:
    rows = read_task_file(config, "train_file")  # before a database is started for them
    async with open_run_store(config, may_create=True) as store:
        return len(rows), await enqueue_train_tasks(config, store, rows=rows)
