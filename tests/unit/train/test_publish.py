import os
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.protocols import TrainStore
from agentrl.store import MemoryStore
from agentrl.train.feed import StoreFeed
from agentrl.train.publish import PolicyPublisher
from agentrl.types import CanaryReference
from tiny_model import tiny_qwen3, write_tiny_model

CANARY = CanaryReference(prompts=((3, 4, 5),), logprobs=(-1.5, -0.25))


def test_versions_are_complete_models_announced_by_absolute_path_and_pruned(tmp_path: Path) -> None:
    start = write_tiny_model(tmp_path / "start")
    model = tiny_qwen3()
    store = MemoryStore()

    async def open_store() -> TrainStore:
        return store

    with StoreFeed(open_store, timeout_s=5.0) as feed:
        publisher = PolicyPublisher(feed, run_dir=tmp_path / "run", tokenizer_source=start, keep=4)
        for version in range(12):
            assert not publisher.is_announced(version)
            with torch.no_grad():
                model.model.norm.weight.fill_(float(version))
            publisher.publish(version, causal_lm=model, state=dict(model.named_parameters()), canary=CANARY)
        latest = feed.call(lambda opened: opened.latest_policy())

        assert latest is not None
        assert latest.canary == CANARY
        assert (latest.version, latest.path) == (11, str((tmp_path / "run" / "policy" / "v11").resolve()))
        kept = {path.name for path in (tmp_path / "run" / "policy").iterdir()}
        assert kept == {"v0", "v8", "v9", "v10", "v11"}
        loaded = AutoModelForCausalLM.from_pretrained(latest.path)
        assert loaded.model.norm.weight.unique().tolist() == [11.0]
        assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} == {
            path.name for path in Path(latest.path).iterdir()
        }

        again = PolicyPublisher(feed, run_dir=tmp_path / "run", tokenizer_source=start, keep=4)
        assert again.is_announced(11)
        assert not again.is_announced(12)


def test_what_a_kill_left_half_written_is_removed_and_written_again(tmp_path: Path) -> None:
    start = write_tiny_model(tmp_path / "start")
    model = tiny_qwen3()
    leftover = tmp_path / "run" / "policy" / "v3.tmp"
    leftover.mkdir(parents=True)
    unannounced = tmp_path / "run" / "policy" / "v3"
    unannounced.mkdir()
    (unannounced / "half").write_text("x")

    async def open_store() -> TrainStore:
        return MemoryStore()

    with StoreFeed(open_store, timeout_s=5.0) as feed:
        publisher = PolicyPublisher(feed, run_dir=tmp_path / "run", tokenizer_source=start, keep=4)
        assert not leftover.exists()
        publisher.publish(3, causal_lm=model, state=dict(model.named_parameters()), canary=CANARY)

    assert not (unannounced / "half").exists()
    assert (unannounced / "model.safetensors").is_file()


@pytest.mark.parametrize("damage", ["gone", "truncated", "empty", "moved"])
def test_the_newest_version_is_written_again_if_its_folder_was_lost(tmp_path: Path, damage: str) -> None:
    start = write_tiny_model(tmp_path / "start")
    model = tiny_qwen3()
    store = MemoryStore()

    async def open_store() -> TrainStore:
        return store

    with StoreFeed(open_store, timeout_s=5.0) as feed:
        publisher = PolicyPublisher(feed, run_dir=tmp_path / "run", tokenizer_source=start, keep=4)
        for version in (0, 1):
            publisher.publish(version, causal_lm=model, state=dict(model.named_parameters()), canary=CANARY)
        folder = tmp_path / "run" / "policy" / "v1"
        weights = folder / "model.safetensors"
        match damage:
            case "gone":
                shutil.rmtree(folder)
            case "truncated":
                os.truncate(weights, weights.stat().st_size - 1)
            case "empty":
                shutil.rmtree(folder)
                folder.mkdir()
            case "moved":
                (tmp_path / "run").rename(tmp_path / "elsewhere")
        run_dir = tmp_path / ("elsewhere" if damage == "moved" else "run")

        again = PolicyPublisher(feed, run_dir=run_dir, tokenizer_source=start, keep=4)

        assert again.is_announced(0)
        assert not again.is_announced(1)
        again.publish(1, causal_lm=model, state=dict(model.named_parameters()), canary=CANARY)
        assert again.is_announced(1)
        latest = feed.call(lambda opened: opened.latest_policy())
    assert latest is not None
    assert AutoModelForCausalLM.from_pretrained(latest.path) is not None


def test_bfloat16_weights_are_declared_in_the_config(tmp_path: Path) -> None:
    start = write_tiny_model(tmp_path / "start")
    model = tiny_qwen3()
    state = {name: weight.detach().to(torch.bfloat16) for name, weight in model.named_parameters()}

    async def open_store() -> TrainStore:
        return MemoryStore()

    with StoreFeed(open_store, timeout_s=5.0) as feed:
        PolicyPublisher(feed, run_dir=tmp_path, tokenizer_source=start, keep=4).publish(
            0, causal_lm=model, state=state, canary=CANARY
        )

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "policy" / "v0", dtype="auto").dtype is torch.bfloat16
