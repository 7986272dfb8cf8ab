"""Makes what the laptop profile's start model is trained from: random weights, a tokenizer, and demonstrations.

    python assets/laptop/build_start.py --out DIR --seed 0

    DIR/model/                   Qwen3 of 0.24 million random parameters, with tokenizer and chat template
    DIR/demonstrations.jsonl     {"id", "token_ids", "loss_mask"}: the flawed teacher's conversations (laptop_teacher)

The ordinary trainer then imitates the demonstrations (assets/profiles/laptop_start.yml). A demonstration's token ids
are those a rollout of the same words would have: prompts and continuations are rendered by the rollout's ChatFormat.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from laptop_teacher import ARGUMENT_NAMES, Lesson, Teacher
from laptop_tokenizer import CONTEXT_LENGTH, END_OF_TURN, PADDING, write_tokenizer
from laptop_world import Tools
from tokenizers import Tokenizer

from agentrl.chat import ChatFormat
from agentrl.types import ToolSpec

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

NUM_DEMONSTRATIONS = 18_000
HIDDEN_SIZE = 96
NUM_LAYERS = 2
NUM_HEADS = 2
INITIAL_STD = 0.1  # about 1 / sqrt(HIDDEN_SIZE): embeddings of length one


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """One training row: token ids, and which of them the assistant wrote."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]


class DemonstrationWriter:
    """Turns lessons into rows, token for token as a rollout would see them."""

    def __init__(self, model_dir: Path) -> None:
        self._chat = ChatFormat.load(model_dir)
        self._tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        self._tools = [
            ToolSpec(name=name, description="", parameters={"type": "object", "properties": {argument: {}}})
            for name, argument in ARGUMENT_NAMES.items()
        ]

    def write(self, lesson: Lesson) -> Demonstration:
        """The row of a lesson. Drills show no tools."""
        tools = [] if lesson.is_drill else self._tools
        system = [{"role": "system", "content": lesson.system_prompt}] if lesson.system_prompt else []
        token_ids = list(self._chat.render_prompt([*system, {"role": "user", "content": lesson.query}], tools=tools))
        mask = [False] * len(token_ids)
        for index, completion in enumerate(lesson.completions):
            # Here markup is meant: the completion is what the model itself should produce.
            completion_ids = self._tokenizer.encode(completion + END_OF_TURN, add_special_tokens=False).ids
            token_ids += completion_ids
            mask += [True] * len(completion_ids)
            if index < len(lesson.results):
                tool, result = lesson.results[index]
                message = {"role": "tool", "name": tool, "content": result}
                new_ids = self._chat.render_continuation([message], completion_ids=completion_ids, tools=tools)
                token_ids += new_ids
                mask += [False] * len(new_ids)
        return Demonstration(token_ids=tuple(token_ids), loss_mask=tuple(mask))


def demonstrations(seed: int, count: int, *, model_dir: Path) -> Iterator[Demonstration]:
    """The first `count` rows of a seed, for the tokenizer in `model_dir`."""
    writer = DemonstrationWriter(model_dir)
    teacher = Teacher(Tools(), rng=random.Random(f"demonstrations {seed}"))
    return (writer.write(lesson) for lesson in teacher.lessons(count))


def write_model(model_dir: Path, *, seed: int) -> None:
    """Tokenizer and random weights, as `AutoModelForCausalLM` and the engine load them."""
    tokenizer = write_tokenizer(model_dir, names=Tools().names())
    build_model(tokenizer, seed=seed).save_pretrained(model_dir)


def build_model(tokenizer: Tokenizer, *, seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 with random weights whose attention starts as a copying machine.

    In every layer the value projection is a random rotation and the output projection its inverse: a head passes on
    what it looks at, unchanged. Learning to copy is then learning where to look, which takes far fewer steps.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=HIDDEN_SIZE,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=NUM_HEADS,
            num_key_value_heads=NUM_HEADS,
            head_dim=HIDDEN_SIZE // NUM_HEADS,
            intermediate_size=2 * HIDDEN_SIZE,
            tie_word_embeddings=True,
            max_position_embeddings=CONTEXT_LENGTH,
            initializer_range=INITIAL_STD,
            bos_token_id=None,
            eos_token_id=tokenizer.token_to_id(END_OF_TURN),
            pad_token_id=tokenizer.token_to_id(PADDING),
        )
    )
    for layer in model.model.layers:
        rotation = torch.linalg.qr(torch.randn(HIDDEN_SIZE, HIDDEN_SIZE)).Q
        layer.self_attn.v_proj.weight.data.copy_(rotation.T)
        layer.self_attn.o_proj.weight.data.copy_(rotation)
    return model


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Write the laptop profile's untrained model and its demonstrations.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=NUM_DEMONSTRATIONS, help="demonstrations (default: %(default)s)")
    flags = parser.parse_args()
    write_model(flags.out / "model", seed=flags.seed)
    with (flags.out / "demonstrations.jsonl").open("w", encoding="utf-8") as lines:
        for index, row in enumerate(demonstrations(flags.seed, flags.count, model_dir=flags.out / "model")):
            mask = [int(is_trained) for is_trained in row.loss_mask]
            content = {"id": f"demonstration-{index:05d}", "token_ids": row.token_ids, "loss_mask": mask}
            lines.write(json.dumps(content) + "\n")


if __name__ == "__main__":
    main()
