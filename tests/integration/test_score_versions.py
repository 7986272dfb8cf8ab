"""A run that switches to other scores on the way, with real samplers and a real planner: audited afterwards."""

from __future__ import annotations

from pathlib import Path

from agentrl.config import RunConfig
from agentrl.inspector.audit import audit_run
from agentrl.scoring import MCPScorerFactory
from idle_trainer import Solver, Trainer, sampler, store_with
from scripted_engine import ScriptedEngine
from tiny_chat import write_tiny_chat

HALVED = "0.5*em"


def make_config(score_version: str | None) -> RunConfig:
    values = {
        "store": {"heartbeat_s": 0.02, "lease_s": 5.0},
        "rollout": {"num_generations": 2, "max_new_tokens": 200, "max_prompt_tokens": 2000},
        "inference": {"context_length": 4000},
        "algo": {"tasks_per_step": 2, "advantage": "group_mean", "max_staleness": 3, "score_version": score_version},
        "train": {"data_timeout_s": 20.0},
    }
    return RunConfig.model_validate(values)


async def test_from_the_switch_on_only_groups_with_the_new_scores_are_trained_and_the_old_rows_stay(
    tmp_path: Path,
) -> None:
    store = await store_with(6)
    engine = ScriptedEngine(write_tiny_chat(tmp_path), Solver())
    before = make_config(None)
    async with sampler(before, store, engine):
        earlier = await Trainer(before, store, engine).steps(2)
    trained_ids = [row_id for entry in earlier for row_id in entry.sequence_ids]
    trained = {row.id: row.advantages.tobytes() for row in await store.load_sequences(trained_ids)}
    waiting = {group.settlement.task_id for group in await store.settled_groups(split="train", limit=99)}
    assert waiting, "settled with the old scores, and not trained yet"

    after = make_config(HALVED)
    async with sampler(after, store, engine):
        later = await Trainer(after, store, engine).steps(3, first=3)

    version = MCPScorerFactory.version(HALVED, judge=None)
    assert [entry.score_versions for entry in earlier] == [{}, {}]
    assert [set(entry.score_versions.values()) for entry in later] == [{version}] * 3
    assert all(set(entry.score_versions) == set(entry.task_ids) for entry in later)
    assert later[0].metrics["num_dropped_score_version"] == len(waiting)
    assert not waiting.intersection(task_id for entry in later for task_id in entry.task_ids)
    rows = await store.load_sequences([row_id for entry in later for row_id in entry.sequence_ids])
    assert {row.score_version for row in rows} == {version}
    assert {row.reward for row in rows} == {0.0, 0.5}
    again = await store.load_sequences(trained_ids)
    assert {row.id: row.advantages.tobytes() for row in again} == trained
    assert {row.score_version for row in again} == {None}
    report = await audit_run(store, config=after, run_dir=None)
    assert [finding for result in report.results for finding in result.findings] == []
