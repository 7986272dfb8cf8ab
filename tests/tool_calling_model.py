"""A language model of one layer that calls the tool `work` and answers, by chance: for runs with a real engine.

Weights are set, not trained. The embeddings are one-hot and the head holds the log-probs of the next token given the
last one: a bigram model over pieces of text that are tokens of their own. Attention adds a little noise, so that
log-probs depend on the whole context, and on the order of floating-point additions.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from tiny_chat import write_tiny_chat

NUMBERS = range(1, 4)
_CALLS = [f'<tool_call>{{"name": "work", "arguments": {{"n": {number}' for number in NUMBERS]
_CALL_END = "}}</tool_call>"
_ANSWERS = [f"<answer>{total}</answer>" for total in range(2, 7)]
_THOUGHTS = ["Let me see. ", "I add. ", "Once more: "]
_NOISE = 0.05


def write_tool_calling_model(directory: Path) -> Path:
    """Write tokenizer, template and weights; returns the directory."""
    write_tiny_chat(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    pieces = [*_CALLS, _CALL_END, *_ANSWERS, *_THOUGHTS]
    tokenizer.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in pieces])
    tokenizer.save(str(directory / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab()
    size = -(-len(vocabulary) // 4) * 4
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=size, hidden_size=size, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, intermediate_size=8, tie_word_embeddings=False, max_position_embeddings=4096, eos_token_id=None,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.model.layers[0].self_attn.o_proj.weight.mul_(_NOISE)
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.copy_(
            _next_token_logits(vocabulary, size=size).T / size**0.5
        )  # the norm scales by sqrt(size)
    model.save_pretrained(directory)
    return directory


def _next_token_logits(vocabulary: dict[str, int], *, size: int) -> torch.Tensor:
    """Row: last token; column: next token."""
    end, digits = "<|im_end|>", [str(number) for number in NUMBERS]
    follows = {
        "Ċ": [*_THOUGHTS, *_CALLS, *_ANSWERS],  # the line break after the name of the assistant
        **{key: [*_CALLS, *_CALLS, *_ANSWERS] for key in _THOUGHTS},
        **dict.fromkeys(_CALLS, digits),
        **{key: [_CALL_END] for key in digits},
        _CALL_END: [end, *_CALLS],
        **{key: [end] for key in _ANSWERS},
    }
    logits = torch.full((size, size), -30.0)
    for last, options in follows.items():
        logits[vocabulary[last], [vocabulary[option] for option in options]] = 0.0
    return logits
