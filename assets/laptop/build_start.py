"""Makes what the laptop profile's start model is trained from: random weights, a tokenizer, and demonstrations.

    python assets/laptop/build_start.py --out DIR --seed 0

    DIR/model/                   Qwen3 of 0.24 million random parameters, with tokenizer and chat template
    DIR/demonstrations.jsonl     {"id", "token_ids", "weights"}: the flawed teacher's conversations (laptop_teacher)

The ordinary trainer then imitates the demonstrations (assets/profiles/laptop_start.yml).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from laptop_teacher import ARGUMENT_NAMES, Teacher
from laptop_tokenizer import WORDS, write_tokenizer
from laptop_world import Tools
from start_model import Demonstration, DemonstrationWriter, ModelSize, build_model, builder_flags, write_demonstrations

NUM_DEMONSTRATIONS = 18_000
SIZE = ModelSize(hidden_size=96, num_layers=2, num_heads=2)


def demonstrations(seed: int, count: int, *, model_dir: Path) -> Iterator[Demonstration]:
    """The first `count` rows of a seed, for the tokenizer in `model_dir`."""
    writer = DemonstrationWriter(model_dir, argument_names=ARGUMENT_NAMES)
    teacher = Teacher(Tools(), rng=random.Random(f"demonstrations {seed}"))
    return (writer.write(lesson) for lesson in teacher.lessons(count))


def write_model(model_dir: Path, *, seed: int) -> None:
    """Tokenizer and random weights, as `AutoModelForCausalLM` and the engine load them."""
    tokenizer = write_tokenizer(model_dir, words=WORDS, names=Tools().names())
    build_model(tokenizer, size=SIZE, seed=seed).save_pretrained(model_dir)


def main() -> None:
    """Command line."""
    flags = builder_flags(
        description="Write the laptop profile's untrained model and its demonstrations.", count=NUM_DEMONSTRATIONS
    )
    write_model(flags.out / "model", seed=flags.seed)
    rows = demonstrations(flags.seed, flags.count, model_dir=flags.out / "model")
    write_demonstrations(flags.out / "demonstrations.jsonl", rows)


if __name__ == "__main__":
    main()
