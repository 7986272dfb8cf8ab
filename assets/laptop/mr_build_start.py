"""Makes what the reflection example's start model is trained from: random weights, a tokenizer, and demonstrations.

    python assets/laptop/mr_build_start.py --out DIR --seed 0

    DIR/model/                   Qwen3 of 0.57 million random parameters, with tokenizer and chat template
    DIR/demonstrations.jsonl     {"id", "token_ids", "weights"}: the flawed teacher's conversations (mr_teacher)

The ordinary trainer then imitates the demonstrations (assets/profiles/mr_search_laptop_start.yml).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from laptop_tokenizer import write_tokenizer
from mr_teacher import ARGUMENT_NAMES, Teacher
from mr_world import TRADES, draw_names
from start_model import Demonstration, DemonstrationWriter, ModelSize, build_model, builder_flags, write_demonstrations

NUM_DEMONSTRATIONS = 14_400
EMPHASIS = {" at": 8.0, "?": 8.0}  # what follows `Looking for the baker`: the outcome of a comparison
SIZE = ModelSize(hidden_size=128, num_layers=3, num_heads=2)
WORDS = (
    *("Tools", "Who", "Where", "Look", "Looking", "See", "Answer", "search", "query", "unknown"),
    *(" search", " is", " the", " a", " boss", " of", " works", " at", " has", " for", " again", " now"),
    *(f" {trade}" for trade in TRADES),
)


def demonstrations(seed: int, count: int, *, model_dir: Path) -> Iterator[Demonstration]:
    """The first `count` rows of a seed, for the tokenizer in `model_dir`."""
    writer = DemonstrationWriter(model_dir, argument_names=ARGUMENT_NAMES, emphasis=EMPHASIS)
    teacher = Teacher(draw_names(), rng=random.Random(f"mr_search demonstrations {seed}"))
    return (writer.write(lesson) for lesson in teacher.lessons(count))


def write_model(model_dir: Path, *, seed: int) -> None:
    """Tokenizer and random weights, as `AutoModelForCausalLM` and the engine load them."""
    tokenizer = write_tokenizer(model_dir, words=WORDS, names=draw_names().all())
    build_model(tokenizer, size=SIZE, seed=seed).save_pretrained(model_dir)


def main() -> None:
    """Command line."""
    flags = builder_flags(
        description="Write the reflection example's untrained model and its demonstrations.", count=NUM_DEMONSTRATIONS
    )
    write_model(flags.out / "model", seed=flags.seed)
    rows = demonstrations(flags.seed, flags.count, model_dir=flags.out / "model")
    write_demonstrations(flags.out / "demonstrations.jsonl", rows)


if __name__ == "__main__":
    main()
