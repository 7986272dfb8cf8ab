from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from agentrl.algo.settle import DropReason, settle_group
from agentrl.config.sections import AlgoConfig
from agentrl.types import (
    DBRecordData,
    GroupOutcome,
    GroupSettlement,
    Record,
    RecordStatus,
    StopReason,
    Task,
    Turn,
)
from factories import make_record, make_task, make_turn

MEAN = AlgoConfig(advantage="group_mean")


def scored(task: Task, generation: int, score: float, *, stop: StopReason = StopReason.ANSWER) -> Record:
    return make_record(task, generation=generation, status=RecordStatus.FINISHED, stop_reason=stop, score=score)


def failed(task: Task, generation: int, *, stop: StopReason = StopReason.ENGINE_ERROR) -> Record:
    return make_record(task, generation=generation, status=RecordStatus.FAILED, stop_reason=stop)


def settle(
    records: Sequence[Record],
    *,
    task: Task,
    algo: AlgoConfig = MEAN,
    min_turns: int = 0,
    num_turns: int = 1,
) -> tuple[GroupSettlement, list[DBRecordData]]:
    def chain(record: Record) -> list[Turn]:
        return [make_turn(record, index=index) for index in range(num_turns)]

    turns = {record.id: chain(record) for record in records}
    return settle_group(task, records, turns, algo=algo, min_turns=min_turns)


def test_a_group_with_signal_gives_rows_with_its_advantages() -> None:
    task = make_task(num_generations=2)
    settlement, rows = settle([scored(task, 0, 1.0), scored(task, 1, 0.0)], task=task)
    assert settlement.outcome is GroupOutcome.TRAINABLE
    assert settlement.drop_reason is None
    assert settlement.rewards == {f"{task.id}/g0": 1.0, f"{task.id}/g1": 0.0}
    assert settlement.advantages == {f"{task.id}/g0": 0.5, f"{task.id}/g1": -0.5}
    assert settlement.num_failed == 0
    assert [(row.id, row.reward, row.advantages.max() + row.advantages.min()) for row in rows] == [
        (f"{task.id}/g0/s0", 1.0, 0.5),
        (f"{task.id}/g1/s0", 0.0, -0.5),
    ]


@pytest.mark.parametrize("stop", [reason for reason in StopReason if reason.is_infrastructure])
def test_infrastructure_failures_leave_the_baseline_and_are_counted(stop: StopReason) -> None:
    task = make_task(num_generations=4)
    records = [
        scored(task, 0, 1.0),
        scored(task, 1, 0.5),
        failed(task, 2, stop=stop),
        scored(task, 3, 0.0, stop=stop),  # a score of a rollout the system ended is no score
    ]
    settlement, rows = settle(records, task=task)
    assert settlement.advantages == {f"{task.id}/g0": 0.25, f"{task.id}/g1": -0.25}
    assert settlement.num_failed == 2
    assert len(rows) == 2


def test_unfinished_missing_and_unscorable_records_are_failures_not_zeros() -> None:
    task = make_task(num_generations=5)
    running = make_record(task, generation=2)
    no_number = scored(task, 3, float("nan"))
    settlement, _ = settle([scored(task, 0, 1.0), scored(task, 1, 0.0), running, no_number], task=task)
    assert set(settlement.rewards) == {f"{task.id}/g0", f"{task.id}/g1"}
    assert settlement.num_failed == 3


@pytest.mark.parametrize("advantage", ["group_norm", "group_mean", "rloo", "leave_one_out_sign_clip"])
def test_fewer_than_two_scored_records_have_no_baseline(advantage: str) -> None:
    task = make_task(num_generations=2)
    settlement, rows = settle([scored(task, 0, 1.0), failed(task, 1)], task=task, algo=AlgoConfig(advantage=advantage))
    assert (settlement.outcome, settlement.drop_reason) == (GroupOutcome.DROPPED, DropReason.TOO_FEW_SCORED)
    assert settlement.rewards == {f"{task.id}/g0": 1.0}
    assert rows == []


def test_a_group_without_spread_is_dropped_unless_asked_to_keep_it() -> None:
    task = make_task(num_generations=2)
    records = [scored(task, 0, 0.1), scored(task, 1, 0.1)]
    settlement, rows = settle(records, task=task)
    assert (settlement.outcome, settlement.drop_reason, rows) == (GroupOutcome.DROPPED, "zero_advantage", [])
    keep = AlgoConfig(advantage="group_mean", drop_zero_advantage=False)
    settlement, rows = settle(records, task=task, algo=keep)
    assert settlement.outcome is GroupOutcome.TRAINABLE
    assert [float(abs(row.advantages).max()) for row in rows] == [0.0, 0.0]


def test_a_record_without_advantage_gives_no_row() -> None:
    task = make_task(num_generations=3)
    settlement, rows = settle([scored(task, g, score) for g, score in enumerate([0.0, 0.5, 1.0])], task=task)
    assert settlement.advantages[f"{task.id}/g1"] == 0.0
    assert [row.record_id for row in rows] == [f"{task.id}/g0", f"{task.id}/g2"]


def test_a_correct_record_with_too_few_turns_is_in_the_baseline_but_not_trained() -> None:
    task = make_task(num_generations=2)
    records = [scored(task, 0, 1.0), scored(task, 1, 0.0)]
    settlement, rows = settle(records, task=task, min_turns=2, num_turns=1)
    assert settlement.outcome is GroupOutcome.TRAINABLE
    assert [row.record_id for row in rows] == [f"{task.id}/g1"]
    _, rows = settle(records, task=task, min_turns=2, num_turns=2)
    assert len(rows) == 2


def test_a_group_of_which_nothing_may_be_trained_says_why() -> None:
    task = make_task(num_generations=2)
    records = [scored(task, 0, 1.0), scored(task, 1, 0.8)]
    settlement, rows = settle(records, task=task, min_turns=2)
    assert (settlement.outcome, settlement.drop_reason, rows) == (GroupOutcome.DROPPED, DropReason.MIN_TURNS, [])
    settlement, rows = settle(records, task=task, num_turns=0)
    assert (settlement.drop_reason, rows) == (DropReason.NO_SAMPLED_TOKENS, [])


def test_without_a_baseline_every_scored_record_has_advantage_one() -> None:
    task = make_task(num_generations=3)
    none = AlgoConfig(advantage="none")
    settlement, rows = settle([scored(task, 0, 0.0), failed(task, 1), scored(task, 2, 1.0)], task=task, algo=none)
    assert settlement.advantages == {f"{task.id}/g0": 1.0, f"{task.id}/g2": 1.0}
    assert len(rows) == 2
    settlement, _ = settle([failed(task, 0)], task=task, algo=none)
    assert settlement.drop_reason == DropReason.TOO_FEW_SCORED


@pytest.mark.parametrize("split", ["eval", "test", "validation"])
def test_other_splits_are_only_evaluated(split: str) -> None:
    task = make_task(split=split, num_generations=2)
    settlement, rows = settle([scored(task, 0, 1.0), failed(task, 1)], task=task)
    assert settlement.outcome is GroupOutcome.EVALUATED
    assert settlement.rewards == {f"{task.id}/g0": 1.0}
    assert (settlement.advantages, settlement.num_failed, rows) == ({}, 1, [])


def test_a_training_split_may_have_a_suffix() -> None:
    task = make_task(split="train_hard", num_generations=2)
    settlement, _ = settle([scored(task, 0, 1.0), scored(task, 1, 0.0)], task=task)
    assert settlement.outcome is GroupOutcome.TRAINABLE


def test_branches_of_a_record_all_carry_its_reward() -> None:
    task = make_task(num_generations=2)
    records = [scored(task, 0, 1.0), scored(task, 1, 0.0)]
    turns = {
        record.id: [make_turn(record, index=0), make_turn(record, index=1), make_turn(record, index=2, parent_turn=0)]
        for record in records
    }
    _, rows = settle_group(task, records, turns, algo=MEAN, min_turns=0)
    assert [(row.id.rpartition("/")[2], row.reward) for row in rows] == [
        ("s0", 1.0),
        ("s1", 1.0),
        ("s0", 0.0),
        ("s1", 0.0),
    ]


def test_settling_twice_decides_the_same() -> None:
    task = make_task(num_generations=2)
    records = [scored(task, 0, 1.0), replace(scored(task, 1, 0.0), worker="other")]
    first, second = settle(records, task=task), settle(records, task=task)
    assert first[0] == second[0]
    assert [row.id for row in first[1]] == [row.id for row in second[1]]


def test_a_sampler_can_settle_without_torch() -> None:
    modules = "agentrl.algo.settle, agentrl.algo.advantages, agentrl.algo.merge, agentrl.algo.packing"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("score", [1e39, -1e308, float("inf"), float("nan"), "7", None])
@pytest.mark.parametrize("advantage", ["group_norm", "rloo", "turn_rloo", "reinforce_plus_plus"])
def test_what_no_advantage_could_be_made_of_is_a_failure(score: object, advantage: str) -> None:
    task = make_task(num_generations=3)
    broken = replace(scored(task, 0, 0.0), score=score)
    algo = AlgoConfig(advantage=advantage)
    settlement, rows = settle([broken, scored(task, 1, 1.0), scored(task, 2, 0.0)], task=task, algo=algo)
    assert settlement.num_failed == 1
    assert broken.id not in settlement.rewards
    assert rows
    assert all(np.isfinite(row.advantages).all() for row in rows)


@pytest.mark.parametrize("turn_scores", [(1.0,), (1.0, 0.0, 0.0), (None, float("nan")), (1e300, 0.0), ("x", 0.0)])
@pytest.mark.parametrize("advantage", ["rloo", "turn_rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_turn_scores_that_do_not_fit_the_turns_are_a_failure(turn_scores: tuple[object, ...], advantage: str) -> None:
    task = make_task(num_generations=3)
    broken = replace(scored(task, 0, 1.0), turn_scores=turn_scores)
    sound = [replace(scored(task, 1, 1.0), turn_scores=(None, 1.0)), scored(task, 2, 0.0)]
    settlement, rows = settle([broken, *sound], task=task, algo=AlgoConfig(advantage=advantage), num_turns=2)
    assert settlement.num_failed == 1
    assert {row.record_id for row in rows} <= {record.id for record in sound}
    assert all(np.isfinite(row.advantages).all() for row in rows)
