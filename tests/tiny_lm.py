"""Random language models a few kilobytes in size, saved with a word-level tokenizer, and what they should answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 96
EOS_ID = 1
CONTEXT_LENGTH = 512
CLASSES = {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}


def write_lm(directory: Path, *, kind: str = "qwen3", seed: int = 0, hidden_size: int = 32) -> Path:
    """A model with grouped heads, tied embeddings, weights large enough that its choices differ, and EOS token 1."""
    torch.manual_seed(seed)
    config_class, model_class = CLASSES[kind]
    config = config_class(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=64,
        tie_word_embeddings=True,
        max_position_embeddings=2 * CONTEXT_LENGTH,
        initializer_range=0.1,
        eos_token_id=EOS_ID,
        bos_token_id=None,
        pad_token_id=0,
    )
    model_class(config).save_pretrained(directory)
    words = {f"w{index}": index for index in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1", unk_token="w0").save_pretrained(directory)
    return directory


def load_lm(directory: Path) -> PreTrainedModel:
    """The model as Hugging Face computes it: the reference of every test."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa").eval()


@torch.inference_mode()
def expected_logits(model: PreTrainedModel, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> torch.Tensor:
    """Logits that predict each output token, [len(output_ids), vocabulary]."""
    ids = torch.tensor([[*prompt_ids, *output_ids]])
    logits: torch.Tensor = model(input_ids=ids).logits[0, len(prompt_ids) - 1 : -1].float()
    return logits


def expected_logprobs(
    model: PreTrainedModel, prompt_ids: Sequence[int], output_ids: Sequence[int], *, temperature: float = 1.0
) -> torch.Tensor:
    """Log-probs of the output tokens, recomputed in one forward."""
    logprobs = torch.log_softmax(expected_logits(model, prompt_ids, output_ids) / temperature, dim=-1)
    return logprobs.gather(1, torch.tensor(list(output_ids))[:, None])[:, 0]


@torch.inference_mode()
def greedy_ids(model: PreTrainedModel, prompt_ids: Sequence[int], *, max_new_tokens: int) -> list[int]:
    """What `generate` of Hugging Face continues with, EOS included."""
    prompt = torch.tensor([list(prompt_ids)])
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=0
    )
    return output[0, len(prompt_ids) :].tolist()
