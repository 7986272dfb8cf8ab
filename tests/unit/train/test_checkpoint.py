import json
import os
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

from agentrl.config.sections import TrainConfig
from agentrl.errors import ConfigError, UnavailableError
from agentrl.train.checkpoint import (
    checkpoint_path,
    load_training_state,
    newest_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from agentrl.train.model import PolicyModule
from agentrl.train.optimizer import build_optimizer
from tiny_model import tiny_qwen3, write_tiny_model


def prepared(model) -> tuple[Accelerator, PolicyModule, torch.optim.Optimizer]:
    accelerator = Accelerator(cpu=True)
    policy = PolicyModule(model, temperature=1.0, chunk_size=8, with_entropy=False)
    policy, optimizer = accelerator.prepare(policy, build_optimizer(policy, TrainConfig(learning_rate=1e-2)))
    return accelerator, policy, optimizer


def update(policy: PolicyModule, optimizer: torch.optim.Optimizer) -> None:
    """One step on a loss that draws from torch's random generator."""
    ids_BT = torch.randint(0, 48, (2, 7))
    logprobs_N, _ = policy(ids_BT, torch.arange(6), torch.randint(0, 48, (6,)))
    (-logprobs_N.mean()).backward()
    optimizer.step()
    optimizer.zero_grad()


def save(path: Path, accelerator, policy, optimizer, *, step: int, tokenizer_source: Path) -> None:
    save_checkpoint(
        path,
        accelerator=accelerator,
        policy=policy,
        optimizer=optimizer,
        tokenizer_source=tokenizer_source,
        start_fingerprint="f",
        step=step,
        metrics={"loss": 0.5},
    )


def test_training_goes_on_bitwise_from_a_checkpoint(tmp_path: Path) -> None:
    start = write_tiny_model(tmp_path / "start")
    accelerator, policy, optimizer = prepared(tiny_qwen3())
    update(policy, optimizer)
    update(policy, optimizer)
    save(tmp_path / "c" / "step_2", accelerator, policy, optimizer, step=2, tokenizer_source=start)
    update(policy, optimizer)
    expected = [p.detach().clone() for p in policy.parameters()]
    expected_draw = (torch.rand(3), random.random())

    checkpoint = newest_checkpoint(tmp_path / "c")
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.metrics, checkpoint.num_processes) == (2, {"loss": 0.5}, 1)
    model = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32)
    accelerator, policy, optimizer = prepared(model)
    torch.manual_seed(99)
    load_training_state(checkpoint, accelerator=accelerator, policy=policy, optimizer=optimizer)
    update(policy, optimizer)

    for after, before in zip(policy.parameters(), expected, strict=True):
        assert torch.equal(after, before)
    assert torch.equal(torch.rand(3), expected_draw[0])
    assert random.random() == expected_draw[1]


def test_a_checkpoint_is_a_model_directory_with_tied_weights_once(tmp_path: Path) -> None:
    start = write_tiny_model(tmp_path / "start")
    save(tmp_path / "c" / "step_1", *prepared(tiny_qwen3()), step=1, tokenizer_source=start)

    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "c" / "step_1", output_loading_info=True)

    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert (tmp_path / "c" / "step_1" / "tokenizer.json").read_text() == (start / "tokenizer.json").read_text()


def test_incomplete_checkpoints_are_ignored(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "none") is None
    for name, is_complete in (("step_5", True), ("step_9", False), ("step_12.tmp", True), ("notes", True)):
        (tmp_path / name).mkdir()
        if is_complete:
            state = json.dumps({"step": 5, "metrics": {}, "num_processes": 2})
            (tmp_path / name / "checkpoint.json").write_text(state)

    checkpoint = newest_checkpoint(tmp_path)

    assert checkpoint is not None
    assert checkpoint.path == tmp_path / "step_5"


def test_a_kill_while_writing_leaves_the_older_checkpoint_in_charge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = write_tiny_model(tmp_path / "start")
    parts = prepared(tiny_qwen3())
    save(checkpoint_path(tmp_path, 1), *parts, step=1, tokenizer_source=start)

    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("agentrl.train.checkpoint.finish_directory", killed)
    with pytest.raises(KeyboardInterrupt):
        save(checkpoint_path(tmp_path, 2), *parts, step=2, tokenizer_source=start)

    checkpoint = newest_checkpoint(tmp_path)
    assert checkpoint is not None
    assert checkpoint.step == 1


def test_only_the_newest_checkpoints_are_kept_by_number_not_by_name(tmp_path: Path) -> None:
    for step in (8, 9, 10, 11):
        (tmp_path / f"step_{step}").mkdir()
        state = json.dumps({"step": step, "metrics": {}, "num_processes": 1})
        (tmp_path / f"step_{step}" / "checkpoint.json").write_text(state)

    prune_checkpoints(tmp_path, keep=2)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_10", "step_11"]


@pytest.mark.parametrize("file", ["model.safetensors", "rng_0.pt", "optimizer/.metadata", "checkpoint.json"])
@pytest.mark.parametrize("is_truncated", [True, False])
def test_a_damaged_checkpoint_is_x(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, is_truncated: bool
) -> None:
    start = write_tiny_model(tmp_path / "start")
    parts = prepared(tiny_qwen3())
    folder = tmp_path / "c"
    for step in (1, 2):
        save(checkpoint_path(folder, step), *parts, step=step, tokenizer_source=start)
    damaged = checkpoint_path(folder, 2) / file
    if is_truncated:
        os.truncate(damaged, damaged.stat().st_size // 2)
    else:
        damaged.unlink()

    checkpoint = newest_checkpoint(folder)

    assert checkpoint is not None
    assert checkpoint.step == 1
    assert (f"step_2 is damaged and passed over: {file}" in caplog.text) is (is_truncated or file != "checkpoint.json")
    prune_checkpoints(folder, keep=1)
    assert newest_checkpoint(folder) == checkpoint, "the damaged one does not count as kept"
    save(checkpoint_path(folder, 2), *parts, step=2, tokenizer_source=start)
    newest = newest_checkpoint(folder)
    assert newest is not None
    assert newest.step == 2


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over_without_a_word(tmp_path: Path) -> None:
    save(
        checkpoint_path(tmp_path, 1), *prepared(tiny_qwen3()), step=1, tokenizer_source=write_tiny_model(tmp_path / "m")
    )
    (checkpoint_path(tmp_path, 1) / "model.safetensors").unlink()

    with pytest.raises(ConfigError, match=r"is intact \(step_1: model.safetensors is missing\); restore one"):
        newest_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", "null", '{"sizes": {}}', '{"step": "many", "metrics": {}, "num_processes": 1}']
)
def test_a_checkpoint_whose_state_makes_no_sense_is_passed_over(tmp_path: Path, content: str) -> None:
    for step in (5, 6):
        (tmp_path / f"step_{step}").mkdir()
        state = json.dumps({"step": 5, "metrics": {}, "num_processes": 2}) if step == 5 else content
        (tmp_path / f"step_{step}" / "checkpoint.json").write_text(state)

    checkpoint = newest_checkpoint(tmp_path)

    assert checkpoint is not None
    assert checkpoint.path == tmp_path / "step_5"


def test_a_checkpoint_under_the_name_of_another_step_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "step_7").mkdir()
    (tmp_path / "step_7" / "checkpoint.json").write_text('{"step": 2, "metrics": {}, "num_processes": 1}')
    with pytest.raises(ConfigError, match=r"step_7: checkpoint.json cannot be used \(it is of step 2\)"):
        newest_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        ("rng_0.pt", "random generators"),
        ("optimizer/*.distcp", "optimizer state"),
        ("optimizer/.metadata", "optimizer"),
    ],
)
def test_content_that_was_lost_without_a_trace_is_named_with_the_way_out(
    tmp_path: Path, pattern: str, what: str
) -> None:
    parts = prepared(tiny_qwen3())
    update(*parts[1:])
    save(tmp_path / "step_1", *parts, step=1, tokenizer_source=write_tiny_model(tmp_path / "start"))
    (lost,) = (tmp_path / "step_1").glob(pattern)
    lost.write_bytes(b"\0" * lost.stat().st_size)
    checkpoint = newest_checkpoint(tmp_path)
    assert checkpoint is not None

    with pytest.raises(UnavailableError, match=f"step_1: its {what}.* cannot be read .*; move the folder") as refusal:
        load_training_state(checkpoint, accelerator=parts[0], policy=parts[1], optimizer=parts[2])
    assert "\n" not in str(refusal.value)


@contextmanager
def no_file_above(num_bytes: int) -> Iterator[None]:
    """Stands for a full disk: the kernel refuses to write past this size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("part", ["nothing", "weights", "optimizer state"])
def test_a_disk_that_takes_no_more_is_an_error_of_that_folder_and_the_older_checkpoint_stays(
    tmp_path: Path, part: str
) -> None:
    parts = prepared(tiny_qwen3())
    update(*parts[1:])
    start = write_tiny_model(tmp_path / "start")
    save(tmp_path / "c" / "step_1", *parts, step=1, tokenizer_source=start)
    num_bytes = (tmp_path / "c" / "step_1" / "model.safetensors").stat().st_size
    room = {"nothing": 0, "weights": num_bytes // 2, "optimizer state": num_bytes + 1024}[part]

    with pytest.raises(OSError, match="File too large") as refusal, no_file_above(room):
        save(tmp_path / "c" / "step_2", *parts, step=2, tokenizer_source=start)

    assert refusal.value.filename == str(tmp_path / "c" / "step_2")
    newest = newest_checkpoint(tmp_path / "c")
    assert newest is not None
    assert newest.step == 1
