"""L4 for every way of training: a run that was cut off and resumed ends with the bits of one that was not."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from agentrl.config.sections import RunConfig
from agentrl.errors import ConfigError
from agentrl.store import MemoryStore
from agentrl.train.session import checkpoints_dir
from in_process_training import Crash, final_weights, run_training, settle_groups
from tiny_model import run_config, write_tiny_model

LOSSES = {
    "GRPO": {},
    "GSPO": {"epsilon": 3e-4, "epsilon_higher": 1e-4, "aggregation": "seq_mean_token_mean"},
    "MINIRL": {"aggregation": "seq_mean_token_sum"},
    "CISPO": {},
    "CE_GPPO": {"kl_coef": 0.01},
    "REINFORCE": {"entropy_coef": 0.01, "rollout_correction": "tis", "rollout_correction_normalize": True},
    "CROSS_ENTROPY": {},
}
WAYS = {
    **{name: {"loss": {"loss": name, **options}} for name, options in LOSSES.items()},
    "LoRA": {"model": {"lora_rank": 4}},
    "LoRA with a reference": {"model": {"lora_rank": 4}, "loss": {"kl_coef": 0.01}},
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "start")


def a_run(base: Path, start: Path, **sections: dict[str, object]) -> RunConfig:
    train = {"max_steps": 3, "save_steps": 2, "sft_batch_size": 4, **sections.pop("train", {})}
    algo = {"tasks_per_step": 2, "max_staleness": 9, **sections.pop("algo", {})}
    return run_config(base, model_dir=start, train=train, algo=algo, **sections)


def trained(config: RunConfig, *, crash_at: tuple[str, int] | None = None) -> MemoryStore:
    store = MemoryStore()
    settle_groups(store, 6)
    if crash_at is not None:
        with pytest.raises(Crash):
            run_training(config, store, crash_at=crash_at)
    run_training(config, store)
    return store


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_a_resume_after_a_crash_is_bitwise(tmp_path: Path, start: Path, way: dict[str, dict[str, object]]) -> None:
    straight, crashed = a_run(tmp_path / "a", start, **way), a_run(tmp_path / "b", start, **way)

    trained(straight)
    trained(crashed, crash_at=("optimizer", 3))

    expected, resumed = final_weights(straight), final_weights(crashed)
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(weight, resumed[name]) for name, weight in expected.items())


def test_wider_passes_train_the_same(tmp_path: Path, start: Path) -> None:
    narrow, wide = a_run(tmp_path / "a", start), a_run(tmp_path / "b", start, train={"pad_to_multiple_of": 16})
    for config in (narrow, wide):
        trained(config)

    expected, found = final_weights(narrow), final_weights(wide)
    assert max((found[name] - weight).abs().median().item() for name, weight in expected.items()) <= 1e-6


def test_a_lora_run_leaves_plain_models_an_adapter_and_the_start_model_as_it_was(tmp_path: Path, start: Path) -> None:
    config = a_run(tmp_path, start, model={"lora_rank": 4})

    trained(config)

    run_dir = config.run.run_dir
    before = AutoModelForCausalLM.from_pretrained(start)
    first, final = (AutoModelForCausalLM.from_pretrained(run_dir / name) for name in ("policy/v0", "final"))
    assert final.lm_head.weight is final.model.embed_tokens.weight
    for name, weight in before.state_dict().items():
        assert torch.equal(weight, first.state_dict()[name])
        is_target = name.endswith("_proj.weight")
        assert torch.equal(weight, final.state_dict()[name]) is not is_target, name
    adapted = PeftModel.from_pretrained(before, run_dir / "final_adapter")
    ids = torch.arange(8).unsqueeze(0)
    with torch.no_grad():
        assert (adapted(input_ids=ids).logits - final(input_ids=ids).logits).abs().max() < 1e-5
    checkpoint = checkpoints_dir(config) / "step_3"
    assert not (checkpoint / "model.safetensors").exists(), "the base is not written again and again"
    assert json.loads((checkpoint / "adapter_config.json").read_text())["r"] == 4


@pytest.mark.parametrize(("before", "after"), [(0, 4), (4, 0)])
def test_a_run_is_not_continued_with_or_without_its_adapter(
    tmp_path: Path, start: Path, before: int, after: int
) -> None:
    store = MemoryStore()
    settle_groups(store, 6)
    run_training(a_run(tmp_path, start, model={"lora_rank": before}, train={"max_steps": 2}), store)

    with pytest.raises(ConfigError, match=f"lora_rank = {after}, but .* holds a"):
        run_training(a_run(tmp_path, start, model={"lora_rank": after}), store)
