"""The whole loop in one process against MemoryStore: what is trained, published, committed and reported."""

import asyncio
import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agentrl.config.sections import RunConfig
from agentrl.errors import ConfigError, TrainingError, UnavailableError
from agentrl.store import MemoryStore
from agentrl.train.session import checkpoints_dir
from agentrl.types import DBRecordData, GroupOutcome, GroupSettlement, StepStatus
from factories import make_task
from in_process_training import Crash, ListSink, final_weights, run_training, settle_groups
from tiny_model import random_row, run_config, write_tiny_model

PHASES = ["wait", "load", "forward_backward", "optimizer", "checkpoint", "publish", "commit"]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "start")


def rl_config(base: Path, start: Path, **train_settings: object) -> RunConfig:
    settings = {"max_steps": 5, "save_steps": 2, **train_settings}
    return run_config(
        base,
        model_dir=start,
        train=settings,
        algo={"tasks_per_step": 2, "max_staleness": 9},
        inference={"preferred_sampling_params": {"temperature": 0.8}},
    )


def test_every_step_is_committed_published_and_told_with_its_numbers(tmp_path: Path, start: Path) -> None:
    store = MemoryStore()
    settle_groups(store, 12)
    config = rl_config(tmp_path, start)

    sink = run_training(config, store)

    ledger = asyncio.run(store.list_steps())
    assert [(step.step, step.policy_version, step.status) for step in ledger] == [
        (number, number - 1, StepStatus.COMMITTED) for number in range(1, 6)
    ]
    assert [task_id for step in ledger for task_id in step.task_ids] == [f"train:0:q{k:02}" for k in range(10)]
    latest = asyncio.run(store.latest_policy())
    assert latest is not None
    assert (latest.version, Path(latest.path).name) == (5, "v5")
    assert sorted(path.name for path in (config.run.run_dir / "checkpoints").iterdir()) == ["step_4", "step_5"]
    assert [step for step, _ in sink.lines] == [1, 2, 3, 4, 5]
    assert sink.is_closed
    first, second = sink.lines[0][1], sink.lines[1][1]
    assert (first["reward"], first["group_signal_share"]) == (0.5, 1.0)
    assert (second["reward"], second["group_signal_share"]) == (0.75, 0.5)
    assert second["reward_trained"] == 0.5
    assert second["staleness_mean"] == second["staleness_max"] == 1.0
    assert "mismatch" in first
    assert "mismatch" not in second, "no token was sampled at the version being trained"
    names = {
        "loss",
        "entropy",
        "ratio_mean",
        "approx_kl",
        "clip_fraction",
        "grad_norm",
        "lr",
        "num_tokens",
        "num_failed",
    }
    assert names <= first.keys()
    assert {f"seconds_{phase}" for phase in PHASES} - {"seconds_checkpoint"} <= first.keys()
    assert all(math.isfinite(value) for value in first.values())


def test_every_version_is_published_with_the_log_probs_its_engines_must_answer_to_the_canaries(
    tmp_path: Path, start: Path
) -> None:
    """At temperature 1, whatever tokens are sampled at; compared with Hugging Face's forward of the folder."""
    store = MemoryStore()
    settle_groups(store, 12)
    run_training(rl_config(tmp_path, start), store)
    policies = asyncio.run(store.list_policies())
    for policy in policies[-2:]:
        model = AutoModelForCausalLM.from_pretrained(policy.path, dtype=torch.float32).eval()
        assert policy.canary is not None
        with torch.no_grad():
            ids_BT = torch.tensor(policy.canary.prompts)
            logprobs_BTV = model(input_ids=ids_BT).logits[:, :-1].log_softmax(-1)
            expected = logprobs_BTV.gather(2, ids_BT[:, 1:, None]).flatten()
        assert policy.canary.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
    first, last = policies[0].canary, policies[-1].canary
    assert first is not None
    assert last is not None
    assert first.prompts == last.prompts
    assert first.logprobs != last.logprobs


def test_mismatch_and_log_probs_are_those_of_the_sampling_temperature(tmp_path: Path, start: Path) -> None:
    """Rows that carry the model's own log-probs at temperature 0.8 have mismatch 0 and ratio 1 in the first step."""
    model = AutoModelForCausalLM.from_pretrained(start).eval()

    def with_own_logprobs(row: DBRecordData) -> DBRecordData:
        ids = torch.from_numpy(row.token_ids.astype(np.int64))
        with torch.no_grad():
            all_TV = torch.log_softmax(model(input_ids=ids.unsqueeze(0)).logits[0] / 0.8, dim=-1)
        logprobs = np.concatenate([[0.0], all_TV[:-1].gather(1, ids[1:, None])[:, 0].numpy()])
        return replace(row, behaviour_logprobs=np.where(row.loss_mask, logprobs, 0).astype(np.float32))

    rng = np.random.default_rng(2)
    task = make_task("q")
    rows = [with_own_logprobs(random_row(f"{task.id}/g{k}/s0", rng=rng, version=0, task_id=task.id)) for k in range(2)]
    settlement = GroupSettlement(
        task_id=task.id, outcome=GroupOutcome.TRAINABLE, rewards={f"{task.id}/g0": 1.0}, advantages={}
    )
    store = MemoryStore()

    async def write() -> None:
        await store.insert_tasks([task])
        (claim,) = await store.claim_tasks(split="train", owner="w", lease_s=600, limit=1)
        await store.settle_task(claim, settlement, rows)

    asyncio.run(write())
    config = rl_config(tmp_path, start, max_steps=1)
    config = config.model_copy(update={"algo": config.algo.model_copy(update={"tasks_per_step": 1})})

    metrics = run_training(config, store).lines[0][1]

    assert metrics["mismatch_max"] < 1e-5
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("step", [3, 4])
def test_a_crash_in_any_phase_changes_nothing_after_the_resume(
    tmp_path: Path, start: Path, phase: str, step: int
) -> None:
    straight, crashed = MemoryStore(), MemoryStore()
    for store in (straight, crashed):
        settle_groups(store, 12)
    config, crashed_config = rl_config(tmp_path / "a", start), rl_config(tmp_path / "b", start)
    expected = run_training(config, straight)
    is_reached = not (phase == "checkpoint" and step == 3)

    if is_reached:
        with pytest.raises(Crash):
            run_training(crashed_config, crashed, crash_at=(phase, step))
    else:
        run_training(crashed_config, crashed, crash_at=(phase, step))
    sink = run_training(crashed_config, crashed)

    weights, resumed = final_weights(config), final_weights(crashed_config)
    assert all(torch.equal(weight, resumed[name]) for name, weight in weights.items())
    ledgers = [asyncio.run(store.list_steps()) for store in (straight, crashed)]
    assert [(s.step, s.sequence_ids, s.task_ids, s.status) for s in ledgers[0]] == [
        (s.step, s.sequence_ids, s.task_ids, s.status) for s in ledgers[1]
    ]
    losses = {number: metrics["loss"] for number, metrics in expected.lines}
    assert all(metrics["loss"] == losses[number] for number, metrics in sink.lines)
    rewards = [s.metrics["reward"] for s in ledgers[1]]
    assert rewards == [s.metrics["reward"] for s in ledgers[0]], "a replay keeps the plan's group metrics"
    latest = asyncio.run(crashed.latest_policy())
    assert latest is not None
    assert latest.version == 5
    served = load_file(Path(latest.path) / "model.safetensors")
    assert all(torch.equal(weight, served[name]) for name, weight in weights.items())


def test_a_step_planned_with_other_scores_is_trained_bit_for_bit_after_the_scores_were_switched(
    tmp_path: Path, start: Path
) -> None:
    straight, switched = MemoryStore(), MemoryStore()
    for store in (straight, switched):
        settle_groups(store, 12)
    config, before = rl_config(tmp_path / "a", start, max_steps=3), rl_config(tmp_path / "b", start, max_steps=3)
    after = before.model_copy(update={"algo": before.algo.model_copy(update={"score_version": "em"})})
    run_training(config, straight)
    with pytest.raises(Crash):
        run_training(before, switched, crash_at=("optimizer", 3))
    run_training(after, switched)
    weights, resumed = final_weights(config), final_weights(after)
    assert all(torch.equal(weight, resumed[name]) for name, weight in weights.items())
    longer = after.model_copy(update={"train": after.train.model_copy(update={"max_steps": 4, "data_timeout_s": 0.2})})
    with pytest.raises(UnavailableError, match=r"dropped meanwhile: .* score_version"):
        run_training(longer, switched)


def test_a_damaged_newest_checkpoint_changes_nothing_after_the_replay_from_the_one_before(
    tmp_path: Path, start: Path
) -> None:
    straight, damaged = MemoryStore(), MemoryStore()
    for store in (straight, damaged):
        settle_groups(store, 12)
    config = rl_config(tmp_path / "a", start, save_steps=1)
    damaged_config = rl_config(tmp_path / "b", start, save_steps=1)
    run_training(config, straight)
    with pytest.raises(Crash):
        run_training(damaged_config, damaged, crash_at=("wait", 4))
    weights_file = checkpoints_dir(damaged_config) / "step_3" / "model.safetensors"
    os.truncate(weights_file, weights_file.stat().st_size // 2)

    sink = run_training(damaged_config, damaged)

    assert [number for number, _ in sink.lines] == [2, 3, 4, 5], "goes on from checkpoint 2, told again"
    resumed = final_weights(damaged_config)
    assert all(torch.equal(weight, resumed[name]) for name, weight in final_weights(config).items())
    ledgers = [asyncio.run(store.list_steps()) for store in (straight, damaged)]
    assert [(s.step, s.sequence_ids, s.status) for s in ledgers[0]] == [
        (s.step, s.sequence_ids, s.status) for s in ledgers[1]
    ]


def test_a_kill_between_commit_and_sinks_costs_no_line_of_the_metrics(
    tmp_path: Path, start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, config = MemoryStore(), rl_config(tmp_path, start, save_steps=1)
    settle_groups(store, 12)
    with monkeypatch.context() as patched:
        patched.setattr(ListSink, "write", _crash)
        with pytest.raises(Crash):
            run_training(config, store)

    sink = run_training(config, store)

    assert [number for number, _ in sink.lines] == [1, 2, 3, 4, 5]
    assert sink.lines[0][1]["loss"] == asyncio.run(store.list_steps())[0].metrics["loss"]


def _crash(sink: ListSink, step: int, metrics: Mapping[str, float]) -> None:
    raise Crash


def test_the_token_budget_of_a_micro_batch_does_not_change_the_run(tmp_path: Path, start: Path) -> None:
    runs = []
    for max_tokens in (16, 10_000):
        store = MemoryStore()
        settle_groups(store, 4)
        config = rl_config(tmp_path / str(max_tokens), start, max_steps=2, max_tokens=max_tokens)
        config = config.model_copy(
            update={"loss": config.loss.model_copy(update={"aggregation": "seq_mean_token_mean"})}
        )
        runs.append((run_training(config, store), final_weights(config)))

    (small, small_weights), (large, large_weights) = runs
    for name in ("loss", "grad_norm", "entropy", "approx_kl"):
        assert [m[name] for _, m in small.lines] == pytest.approx([m[name] for _, m in large.lines], abs=1e-5)
    differences = torch.cat([(w - large_weights[name]).abs().flatten() for name, w in small_weights.items()])
    assert differences.median() < 1e-6
    assert (differences > 1e-4).float().mean() < 0.005


def test_supervised_training_learns_its_rows_over_several_epochs(tmp_path: Path, start: Path) -> None:
    store = MemoryStore()
    rng = np.random.default_rng(4)
    asyncio.run(store.insert_sequences([random_row(f"r{k}", rng=rng, length=16) for k in range(6)]))
    config = run_config(
        tmp_path,
        model_dir=start,
        rollout={"enable_sampling": False},
        loss={"loss": "CROSS_ENTROPY"},
        train={"max_steps": 60, "save_steps": 40, "sft_batch_size": 4, "learning_rate": 1e-2},
    )

    sink = run_training(config, store)

    losses = [metrics["loss"] for _, metrics in sink.lines]
    assert losses[0] > 3.5
    assert losses[-1] < 0.5
    assert sorted(path.name for path in (config.run.run_dir / "policy").iterdir()) == ["v0", "v40", "v60"]


def test_a_broken_row_stops_the_run_with_its_name_and_the_plan_stays_open(tmp_path: Path, start: Path) -> None:
    store = MemoryStore()
    rows = [random_row(f"r{k}", rng=np.random.default_rng(k), version=0) for k in range(4)]
    rows[2].advantages[:] = np.nan
    asyncio.run(store.insert_sequences(rows))
    config = run_config(tmp_path, model_dir=start, rollout={"enable_sampling": False}, train={"sft_batch_size": 4})

    with pytest.raises(TrainingError, match="row r2: an advantage is not finite"):
        run_training(config, store)

    ledger = asyncio.run(store.list_steps())
    assert [(step.step, step.status) for step in ledger] == [(1, StepStatus.PLANNED)]
    latest = asyncio.run(store.latest_policy())
    assert latest is not None
    assert latest.version == 0


def test_missing_groups_and_foreign_databases_are_explained(tmp_path: Path, start: Path) -> None:
    config = rl_config(tmp_path, start, max_steps=1, data_timeout_s=0.1)
    with pytest.raises(UnavailableError, match="step 1: 0 of tasks_per_step = 2 groups settled"):
        run_training(config, MemoryStore())
    store = MemoryStore()
    settle_groups(store, 2)
    run_training(config, store)

    foreign = MemoryStore()
    with pytest.raises(ConfigError, match="step 1 is not in this database's ledger"):
        run_training(config, foreign)
    assert asyncio.run(foreign.latest_policy()) is None
    refused = config.model_copy(update={"train": config.train.model_copy(update={"resume_from_checkpoint": False})})
    with pytest.raises(ConfigError, match="resume_from_checkpoint = false, but"):
        run_training(refused, store)


def test_a_run_does_not_go_on_from_another_runs_checkpoint_or_start_model(tmp_path: Path, start: Path) -> None:
    stores = {"mine": MemoryStore(), "other": MemoryStore()}
    settle_groups(stores["mine"], 4)
    settle_groups(stores["other"], 5)
    configs = {name: rl_config(tmp_path / name, start, max_steps=1) for name in stores}
    for name, store in stores.items():
        if name == "other":  # its first groups are others
            asyncio.run(store.drop_groups({"train:0:q00": "stale"}))
        run_training(configs[name], store)
    mine = configs["mine"].run.run_dir / "checkpoints"
    shutil.rmtree(mine)
    shutil.copytree(configs["other"].run.run_dir / "checkpoints", mine)
    with pytest.raises(ConfigError, match=r"after a step with num_sequences = 2, .* belongs to another run"):
        run_training(configs["mine"], stores["mine"])

    replaced = write_tiny_model(tmp_path / "replaced", seed=9)
    model = configs["other"].model.model_copy(update={"model_name_or_path": replaced})
    with pytest.raises(ConfigError, match=r"has other weights than the model that .*step_1 was trained from"):
        run_training(configs["other"].model_copy(update={"model": model}), stores["other"])


def test_checkpoint_metrics_survive_as_json(tmp_path: Path, start: Path) -> None:
    store = MemoryStore()
    settle_groups(store, 4)
    config = rl_config(tmp_path, start, max_steps=2)
    run_training(config, store)

    state = json.loads((config.run.run_dir / "checkpoints" / "step_2" / "checkpoint.json").read_text())

    assert state["step"] == 2
    assert state["metrics"]["reward"] == 0.75
