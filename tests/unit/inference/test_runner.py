from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

import tiny_lm
from agentrl.errors import UnavailableError
from agentrl.inference.parameters import parse_sampling
from agentrl.inference.runner import EngineSettings, ModelRunner
from agentrl.inference.sequence import Sequence
from agentrl.inference.weights import WeightsError

SMALL: dict[str, Any] = {
    "vocab_size": tiny_lm.VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
CONFIGS = {
    "qwen3": Qwen3Config(**SMALL, head_dim=16),
    "qwen3 untied": Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=False),
    "qwen2 with biases": Qwen2Config(**SMALL),
    "mistral": MistralConfig(**SMALL, head_dim=8, sliding_window=None),
    "mixture of experts": Qwen3MoeConfig(
        **SMALL, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "gpt2": GPT2Config(
        vocab_size=tiny_lm.VOCAB_SIZE, n_embd=32, n_layer=2, n_head=4, n_positions=128, eos_token_id=None
    ),
}


def save(config: PreTrainedConfig, directory: Path, *, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)  # zero biases would hide a forgotten one
    model.save_pretrained(directory)
    return directory


def runner(directory: Path, *, lean: bool = True) -> ModelRunner:
    settings = EngineSettings(
        model_path=directory, max_running_requests=4, context_length=64, device="cpu", lean_decode=lean
    )
    return ModelRunner(settings)


def generate(model: ModelRunner, prompts: list[list[int]], *, count: int, temperature: float = 1.0) -> list[Sequence]:
    sampling = parse_sampling(
        {"max_new_tokens": count, "temperature": temperature, "ignore_eos": True}, vocab_size=model.vocab_size
    )
    sequences = [
        Sequence(rid=str(index), input_ids=prompt, sampling=sampling, on_event=lambda _: None)
        for index, prompt in enumerate(prompts)
    ]
    for sequence in sequences:
        model.place(sequence)
    model.prefill(sequences)
    for _ in range(count - 1):
        model.decode(sequences)
    for sequence in sequences:
        model.release(sequence)
    return sequences


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_any_decoder_generates_with_the_logprobs_of_its_own_forward(tmp_path: Path, name: str, lean: bool) -> None:
    model = runner(save(CONFIGS[name], tmp_path), lean=lean)
    reference = tiny_lm.load_lm(tmp_path)
    for sequence in generate(model, [[3, 4, 5, 6], [7], [3, 4, 9]], count=20):
        expected = tiny_lm.expected_logprobs(reference, sequence.input_ids, sequence.output_ids)
        assert sequence.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "qwen2 with biases", "mistral"])
def test_new_weights_reach_the_short_decode_step(tmp_path: Path, name: str) -> None:
    model = runner(save(CONFIGS[name], tmp_path / "old"))
    assert model.uses_lean_decode
    model.replace_weights(save(CONFIGS[name], tmp_path / "new", seed=1), forget=True)
    reference = tiny_lm.load_lm(tmp_path / "new")
    for sequence in generate(model, [[3, 4, 5, 6], [7]], count=12):
        expected = tiny_lm.expected_logprobs(reference, sequence.input_ids, sequence.output_ids)
        assert sequence.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def test_weights_of_another_shape_are_refused_and_change_nothing(tmp_path: Path) -> None:
    model = runner(save(CONFIGS["qwen3"], tmp_path / "old"))
    before = model.checksums()
    with pytest.raises(WeightsError, match=r"does not have|missing|shape"):
        model.replace_weights(save(CONFIGS["qwen2 with biases"], tmp_path / "new"), forget=True)
    assert model.checksums() == before


def test_a_model_with_a_window_shorter_than_the_context_is_refused(tmp_path: Path) -> None:
    for name, config in {
        "qwen3": Qwen3Config(**SMALL, head_dim=16, use_sliding_window=True, sliding_window=16, max_window_layers=1),
        "mistral": MistralConfig(**SMALL, head_dim=8, sliding_window=16),
    }.items():
        with pytest.raises(UnavailableError, match="context_length = 64"):
            runner(save(config, tmp_path / name))


def test_nan_logits_end_as_sglang_says_and_do_not_spoil_later_generations(tmp_path: Path) -> None:
    model = runner(save(CONFIGS["qwen3"], tmp_path))
    parameter = model.model.model.layers[0].self_attn.v_proj.weight
    good = parameter.clone()
    parameter.fill_(float("nan"))
    sequence = Sequence(
        rid="nan",
        input_ids=list(range(2, 40)),
        sampling=parse_sampling({"max_new_tokens": 4}, vocab_size=model.vocab_size),
        on_event=lambda _: None,
    )
    model.place(sequence)
    model.prefill([sequence])
    assert sequence.finish_reason == {"type": "stop", "matched": "NaN happened"}
    model.discard(sequence)
    parameter.copy_(good)
    later = generate(model, [[3, 4], list(range(2, 42))], count=10)
    assert all(torch.isfinite(torch.tensor(item.logprobs)).all() for item in later)


def test_long_prompts_are_prefilled_in_chunks_exactly(tmp_path: Path) -> None:
    config = Qwen3Config(**{**SMALL, "max_position_embeddings": 4096}, head_dim=16)
    directory = save(config, tmp_path)
    settings = EngineSettings(model_path=directory, max_running_requests=2, context_length=2600, device="cpu")
    model = ModelRunner(settings)
    prompt = [2 + index * 7 % 90 for index in range(2500)]
    sequence = Sequence(
        rid="long",
        input_ids=prompt,
        sampling=parse_sampling({"max_new_tokens": 2}, vocab_size=model.vocab_size),
        on_event=lambda _: None,
    )
    model.place(sequence)
    rounds = 0
    while sequence.needs_prefill:
        model.prefill([sequence])
        rounds += 1
    assert rounds == 3
    expected = tiny_lm.expected_logprobs(tiny_lm.load_lm(directory), prompt, sequence.output_ids)
    assert sequence.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
