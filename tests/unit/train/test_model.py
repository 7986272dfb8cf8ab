import json
from pathlib import Path

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from agentrl.algo.logprobs import default_chunk_size
from agentrl.errors import ConfigError, UnavailableError
from agentrl.train.model import PolicyModule, check_head, load_policy, sampling_temperature
from tiny_model import run_config, tiny_qwen3, write_tiny_model


def wrapped(model) -> PolicyModule:
    return PolicyModule(model, temperature=1.0, chunk_size=8, with_entropy=False)


def test_a_plain_head_passes_the_check() -> None:
    check_head(wrapped(tiny_qwen3()))


def test_a_model_with_soft_capped_logits_is_refused() -> None:
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        final_logit_softcapping=0.05,
    )

    with pytest.raises(ConfigError, match="Gemma2ForCausalLM: logits are not hidden states times"):
        check_head(wrapped(Gemma2ForCausalLM(config)))


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    config = run_config(tmp_path, model_dir=tmp_path / "nowhere")

    with pytest.raises(UnavailableError, match=r"nowhere: no config\.json"):
        load_policy(tmp_path / "nowhere", config=config, with_entropy=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 48}, "its weights do not fit its config.json"),
        ({"model_type": "nope"}, "cannot load the model"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_the_users_to_fix(tmp_path: Path, change: dict, message: str) -> None:
    folder = write_tiny_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(UnavailableError, match=message):
        load_policy(folder, config=run_config(tmp_path, model_dir=folder), with_entropy=False)


def test_greedy_sampling_cannot_be_trained(tmp_path: Path) -> None:
    config = run_config(tmp_path, model_dir=tmp_path, inference={"preferred_sampling_params": {"temperature": 0.0}})

    with pytest.raises(ConfigError, match="temperature = 0; greedy"):
        sampling_temperature(config)


@pytest.mark.parametrize("saving", ["gradient_checkpointing", "activation_offloading"])
def test_recomputed_activations_give_the_same_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saving: str
) -> None:
    start = write_tiny_model(tmp_path / "start")
    ids_BT = torch.arange(20).reshape(2, 10)
    gradients, kept = [], []
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: kept[-1].append(tensor.shape) or tensor.clone())
    for model in ({}, {saving: True}):
        policy = load_policy(start, config=run_config(tmp_path, model_dir=start, model=model), with_entropy=False)
        kept.append([])
        logprobs_N, _ = policy(ids_BT, torch.arange(9), torch.arange(9) + 1)
        logprobs_N.sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters()]))

    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=1e-5)
    moved = [shape for shape in kept[1] if shape == (2, 10, 32)]
    assert len(moved) >= 2 if saving == "activation_offloading" else not kept[1], "the input of each of two layers"
    assert not [shape for shape in kept[1] if shape == (48, 32)], "the head is no activation"


def test_logits_of_a_large_vocabulary_are_computed_few_at_a_time_unless_told_otherwise(tmp_path: Path) -> None:
    start = write_tiny_model(tmp_path / "start")

    def chunk_size(**train: object) -> int:
        return load_policy(
            start, config=run_config(tmp_path, model_dir=start, train=train), with_entropy=False
        ).chunk_size

    assert chunk_size() == 1024
    assert chunk_size(loss_seq_chunk_size=7) == 7
    assert default_chunk_size(152_000) == 110
    assert default_chunk_size(2**30) == 1


def test_liger_kernels_are_refused_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    start = write_tiny_model(tmp_path / "start")

    with pytest.raises(ConfigError, match=r"use_liger_kernel = true: .* for GPUs and this process has none"):
        load_policy(
            start, config=run_config(tmp_path, model_dir=start, model={"use_liger_kernel": True}), with_entropy=False
        )
