import json
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from peft import PeftModel
from transformers import AutoModelForCausalLM

from agentrl.config.sections import RunConfig
from agentrl.errors import ConfigError, UnavailableError
from agentrl.train.export import adapter_state, model_state, write_model
from agentrl.train.lora import is_adapter, load_adapter, merged_state, write_adapter
from agentrl.train.model import PolicyModule, load_policy
from tiny_model import run_config, write_tiny_model

IDS = torch.arange(9).unsqueeze(0)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "start")


def lora_config(start: Path, **model: object) -> RunConfig:
    return run_config(start, model_dir=start, model={"lora_rank": 4, **model})


def adapted(start: Path, *, seed: int | None = None, **model: object) -> PolicyModule:
    """With a seed the adapter is random instead of no change."""
    policy = load_policy(start, config=lora_config(start, **model), with_entropy=False)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in policy.causal_lm.named_parameters():
            if is_adapter(name):
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    return policy


def logits(causal_lm: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return causal_lm.eval()(input_ids=IDS).logits


def test_only_the_factors_are_trained_and_they_start_as_no_change(start: Path) -> None:
    policy = adapted(start)

    trained = [name for name, parameter in policy.causal_lm.named_parameters() if parameter.requires_grad]

    assert trained
    assert all(is_adapter(name) for name in trained)
    assert {name.split(".")[4] for name in trained} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }, "the head, which is the embedding here, has none"
    assert torch.equal(logits(policy.causal_lm), logits(AutoModelForCausalLM.from_pretrained(start)))
    assert policy.causal_lm.lm_head.weight is policy.causal_lm.model.embed_tokens.weight


def test_chosen_layers_alone_get_an_adapter(start: Path) -> None:
    policy = adapted(start, lora_target_modules="q_proj, v_proj")

    names = {name.split(".")[4] for name, _ in policy.causal_lm.named_parameters() if is_adapter(name)}

    assert names == {"q_proj", "v_proj"}


def test_layers_the_model_does_not_have_are_refused(start: Path) -> None:
    with pytest.raises(ConfigError, match=r"lora_target_modules = query: Target modules .*query.* not found"):
        adapted(start, lora_target_modules="query")


@pytest.mark.parametrize("targets", ["lm_head", "embed_tokens", "q_proj,lm_head", "all-linear,embed_tokens"])
def test_an_adapter_that_would_be_neither_trained_nor_served_is_refused(start: Path, targets: str) -> None:
    with pytest.raises(ConfigError, match=r"is the model's embedding or head, which cannot have an adapter"):
        adapted(start, lora_target_modules=targets)


@pytest.mark.parametrize("alpha", [None, 3.0])
def test_engines_get_a_plain_model_that_computes_what_the_adapted_one_does(
    tmp_path: Path, start: Path, alpha: float | None
) -> None:
    policy = adapted(start, seed=3, lora_alpha=alpha)
    config = lora_config(start, lora_alpha=alpha).model

    state = merged_state(model_state(Accelerator(cpu=True), policy), config=config)
    write_model(tmp_path, causal_lm=policy.causal_lm, state=state, tokenizer_source=start)

    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert (logits(loaded) - logits(policy.causal_lm)).abs().max() < 1e-5
    assert (logits(loaded) - logits(AutoModelForCausalLM.from_pretrained(start))).abs().max() > 1e-3
    before, after = (json.loads((path / "config.json").read_text()) for path in (start, tmp_path))
    assert before == after


def test_peft_loads_the_exported_adapter(tmp_path: Path, start: Path) -> None:
    policy = adapted(start, seed=3)

    write_adapter(tmp_path, causal_lm=policy.causal_lm, state=adapter_state(Accelerator(cpu=True), policy))

    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(start), tmp_path)
    assert torch.equal(logits(loaded), logits(policy.causal_lm))


def test_an_adapter_is_read_back_bitwise(tmp_path: Path, start: Path) -> None:
    policy = adapted(start, seed=3)
    write_adapter(tmp_path, causal_lm=policy.causal_lm, state=adapter_state(Accelerator(cpu=True), policy))

    again = load_policy(start, config=lora_config(start), with_entropy=False, adapter_dir=tmp_path)

    for (name, expected), (_, found) in zip(policy.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(expected, found), name


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lora_rank": 8}, r"lora_rank = 8, but the adapter in .* was trained with 4; set it back"),
        ({"lora_alpha": 3.0}, r"lora_alpha = 3, but the adapter in .* was trained with 8"),
        ({"lora_target_modules": "q_proj"}, r"covers 28 matrices, .* run's 4: lora_target_modules was another one"),
    ],
)
def test_an_adapter_of_another_shape_is_refused(
    tmp_path: Path, start: Path, changed: dict[str, object], message: str
) -> None:
    policy = adapted(start)
    write_adapter(tmp_path, causal_lm=policy.causal_lm, state=adapter_state(Accelerator(cpu=True), policy))

    with pytest.raises(ConfigError, match=message):
        load_policy(start, config=lora_config(start, **changed), with_entropy=False, adapter_dir=tmp_path)


def test_a_full_model_or_half_a_file_is_no_adapter(tmp_path: Path, start: Path) -> None:
    policy = adapted(start)
    config = lora_config(start).model
    with pytest.raises(ConfigError, match=r"lora_rank = 4, but .* holds a full model"):
        load_adapter(policy.causal_lm, start, config=config)
    write_adapter(tmp_path, causal_lm=policy.causal_lm, state=adapter_state(Accelerator(cpu=True), policy))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"half")
    with pytest.raises(UnavailableError, match=r"adapter_model.safetensors: cannot be read"):
        load_adapter(policy.causal_lm, tmp_path, config=config)
