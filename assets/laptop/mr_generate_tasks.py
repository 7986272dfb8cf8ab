"""Writes the reflection example's task files: questions to train on and, about other people, to hold out.

    python assets/laptop/mr_generate_tasks.py --train_file train.jsonl --eval_file heldout.jsonl --seed 0

    {"id": "train-0003", "query": "Who is the boss of Bramon the baker?", "answer": "Ginlin", "scorer": "em",
     "answer_schema": "answer", "metadata": {"kind": "boss", "place": 2, "calls": 4}}

`place` says how many others of the same name a search leads to first, `calls` how many searches the shortest way takes.
Same seed, same files.
"""

from __future__ import annotations

import random
from typing import Any

from generate_tasks import write_task_files
from mr_world import Question, corpus_half, draw_question

NUM_TRAIN = 500
NUM_EVAL = 180  # all questions there are about held-out people


def task_rows(seed: int, *, count: int, is_held_out: bool) -> list[dict[str, Any]]:
    """Rows of one file; no question occurs twice."""
    split = "heldout" if is_held_out else "train"
    world, rng = corpus_half(is_held_out=is_held_out), random.Random(f"mr_search tasks {seed} {split}")
    questions: dict[str, Question] = {}
    while len(questions) < count:
        question = draw_question(world, rng=rng)
        questions.setdefault(question.text, question)
    return [_row(question, item_id=f"{split}-{index:04d}") for index, question in enumerate(questions.values())]


def _row(question: Question, *, item_id: str) -> dict[str, Any]:
    metadata = {"kind": question.kind, "place": question.place, "calls": question.num_calls}
    form = {"scorer": "em", "answer_schema": "answer"}
    return {"id": item_id, "query": question.text, "answer": question.answer, **form, "metadata": metadata}


if __name__ == "__main__":
    write_task_files(
        task_rows, description="Write the reflection example's task files.", num_train=NUM_TRAIN, num_eval=NUM_EVAL
    )
