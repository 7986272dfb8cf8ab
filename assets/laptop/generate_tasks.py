r"""Writes the laptop profile's task files: problems to train on and, from the other half of the world, to hold out.

    python assets/laptop/generate_tasks.py --train_file train.jsonl --eval_file heldout.jsonl --seed 0

    {"id": "train-0003", "query": "What is (37+24)*3?", "answer": "183", "scorer": "em", "answer_schema": "answer",
     "metadata": {"kind": "calculator", "hops": 2}}

Some calculator problems ask for \boxed{...} and are graded by `math`, so that one file mixes two ways of scoring. Same
seed, same files.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from laptop_world import BOXED_PROMPT, TASK_MIX, Problem, Tools, World, draw_distinct

NUM_TRAIN = 800
NUM_EVAL = 256


def task_rows(seed: int, *, count: int, is_held_out: bool) -> list[dict[str, Any]]:
    """Rows of one file; no question occurs twice."""
    split = "heldout" if is_held_out else "train"
    world = World(Tools().counts(), is_held_out=is_held_out, mix=TASK_MIX)
    problems = draw_distinct(world, count, rng=random.Random(f"tasks {seed} {split}"))
    return [_row(problem, item_id=f"{split}-{index:04d}") for index, problem in enumerate(problems)]


def _row(problem: Problem, *, item_id: str) -> dict[str, Any]:
    form = (
        {"scorer": "math", "answer_schema": "boxed", "system_prompt": BOXED_PROMPT}
        if problem.is_boxed
        else {"scorer": "em", "answer_schema": "answer"}
    )
    metadata = {"kind": problem.kind, "hops": len(problem.calls)}
    return {"id": item_id, "query": problem.query, "answer": problem.answer, **form, "metadata": metadata}


def write_task_files(
    rows_of: Callable[..., list[dict[str, Any]]], *, description: str, num_train: int, num_eval: int
) -> None:
    """The command line of a generator whose `rows_of(seed, count=..., is_held_out=...)` makes the rows of one file."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--train_file", type=Path, required=True)
    parser.add_argument("--eval_file", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_train", type=int, default=num_train)
    parser.add_argument("--num_eval", type=int, default=num_eval)
    flags = parser.parse_args()
    for path, count, is_held_out in (
        (flags.train_file, flags.num_train, False),
        (flags.eval_file, flags.num_eval, True),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = rows_of(flags.seed, count=count, is_held_out=is_held_out)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    write_task_files(
        task_rows, description="Write the laptop profile's task files.", num_train=NUM_TRAIN, num_eval=NUM_EVAL
    )
