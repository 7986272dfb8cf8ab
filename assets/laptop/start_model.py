"""Start models: a tiny Qwen3 with random weights, a tokenizer, and demonstrations to imitate. Shared by the builders.

    DIR/model/                   random parameters, with tokenizer and chat template
    DIR/demonstrations.jsonl     {"id", "token_ids", "weights"}: the conversations of a flawed teacher

A demonstration's token ids are those a rollout of the same words would have: prompts and continuations are rendered by
the rollout's ChatFormat.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from laptop_tokenizer import CONTEXT_LENGTH, END_OF_TURN, PADDING
from tokenizers import Tokenizer

from agentrl.chat import ChatFormat
from agentrl.types import ToolSpec

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM


class Conversation(Protocol):
    """What a demonstration shows: completions (without end of turn), and the messages between one and the next."""

    system_prompt: str | None
    query: str
    completions: Sequence[str]
    is_drill: bool  # drills show no tools

    @property
    def replies(self) -> Sequence[Sequence[Mapping[str, Any]]]:
        """The messages between one completion and the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """One training row: token ids, and how much imitating each is worth; 0 for what the assistant did not write."""

    token_ids: tuple[int, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Size of a Qwen3 whose key and value heads are as many as its query heads."""

    hidden_size: int
    num_layers: int
    num_heads: int


class DemonstrationWriter:
    """Turns conversations into rows, token for token as a rollout would see them.

    `emphasis` says how much more than others a token of the assistant counts, by its text: where one of hundreds of
    tokens shows whether the model understood, an average over all would hardly notice.
    """

    def __init__(
        self, model_dir: Path, *, argument_names: Mapping[str, str], emphasis: Mapping[str, float] | None = None
    ) -> None:
        self._chat = ChatFormat.load(model_dir)
        self._tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        self._emphasis = {
            token_id: weight
            for text, weight in (emphasis or {}).items()
            for token_id in self._tokenizer.encode(text, add_special_tokens=False).ids
        }
        self._tools = [
            ToolSpec(name=name, description="", parameters={"type": "object", "properties": {argument: {}}})
            for name, argument in argument_names.items()
        ]

    def write(self, conversation: Conversation) -> Demonstration:
        """The row of a conversation."""
        tools = [] if conversation.is_drill else self._tools
        system = [{"role": "system", "content": conversation.system_prompt}] if conversation.system_prompt else []
        question = {"role": "user", "content": conversation.query}
        token_ids = list(self._chat.render_prompt([*system, question], tools=tools))
        weights = [0.0] * len(token_ids)
        for completion, reply in zip(conversation.completions, [*conversation.replies, ()], strict=True):
            # Here markup is meant: the completion is what the model itself should produce.
            completion_ids = self._tokenizer.encode(completion + END_OF_TURN, add_special_tokens=False).ids
            token_ids += completion_ids
            weights += [self._emphasis.get(token_id, 1.0) for token_id in completion_ids]
            if reply:
                new_ids = self._chat.render_continuation(reply, completion_ids=completion_ids, tools=tools)
                token_ids += new_ids
                weights += [0.0] * len(new_ids)
        return Demonstration(token_ids=tuple(token_ids), weights=tuple(weights))


def build_model(tokenizer: Tokenizer, *, size: ModelSize, seed: int) -> Qwen3ForCausalLM:
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
            hidden_size=size.hidden_size,
            num_hidden_layers=size.num_layers,
            num_attention_heads=size.num_heads,
            num_key_value_heads=size.num_heads,
            head_dim=size.hidden_size // size.num_heads,
            intermediate_size=2 * size.hidden_size,
            tie_word_embeddings=True,
            max_position_embeddings=CONTEXT_LENGTH,
            initializer_range=size.hidden_size**-0.5,  # embeddings of length one
            bos_token_id=None,
            eos_token_id=tokenizer.token_to_id(END_OF_TURN),
            pad_token_id=tokenizer.token_to_id(PADDING),
        )
    )
    for layer in model.model.layers:
        rotation = torch.linalg.qr(torch.randn(size.hidden_size, size.hidden_size)).Q
        layer.self_attn.v_proj.weight.data.copy_(rotation.T)
        layer.self_attn.o_proj.weight.data.copy_(rotation)
    return model


def builder_flags(*, description: str, count: int) -> argparse.Namespace:
    """The command line of a builder: `out`, `seed` and `count`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=count, help="demonstrations (default: %(default)s)")
    return parser.parse_args()


def write_demonstrations(path: Path, rows: Iterable[Demonstration]) -> None:
    """One row a line."""
    with path.open("w", encoding="utf-8") as lines:
        for index, row in enumerate(rows):
            content = {"id": f"demonstration-{index:05d}", "token_ids": row.token_ids, "weights": row.weights}
            lines.write(json.dumps(content) + "\n")
