import json
from pathlib import Path

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

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


def test_recomputed_activations_give_the_same_gradient(tmp_path: Path) -> None:
    start = write_tiny_model(tmp_path / "start")
    ids_BT = torch.arange(20).reshape(2, 10)
    gradients = []
    for is_recomputed in (False, True):
        config = run_config(tmp_path, model_dir=start, model={"gradient_checkpointing": is_recomputed})
        policy = load_policy(start, config=config, with_entropy=False)
        logprobs_N, _ = policy(ids_BT, torch.arange(9), torch.arange(9) + 1)
        logprobs_N.sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters()]))

    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=1e-5)
