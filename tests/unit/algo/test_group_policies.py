"""Each policy by itself, then its effect on what a settled group trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algo.group_policies import (
    LARGEST_SHIFT,
    efficient_rewards,
    is_right,
    short_successes,
    surplus_context_errors,
    surplus_of_balance,
)
from agentrl.algo.settle import settle_group
from agentrl.config.sections import AlgoConfig
from agentrl.types import DBRecordData, GroupOutcome, GroupSettlement, Record, RecordStatus, StopReason, Turn
from factories import make_record, make_task, make_turn

Scored = st.lists(st.tuples(st.sampled_from([0.0, 0.3, 0.5, 0.7, 1.0]), st.integers(1, 6)), min_size=1, max_size=12)


def record_of(
    generation: int, score: float | None, *, stop: StopReason = StopReason.ANSWER, num_generations: int = 8
) -> Record:
    task = make_task(num_generations=num_generations)
    status = RecordStatus.FAILED if score is None else RecordStatus.FINISHED
    return make_record(task, generation=generation, status=status, stop_reason=stop, score=score)


def settle(
    records: Sequence[Record],
    *,
    num_turns: Mapping[int, int] | None = None,
    algo: AlgoConfig | None = None,
    min_turns: int = 0,
    **settings: object,
) -> tuple[GroupSettlement, list[DBRecordData]]:
    def chain(record: Record) -> list[Turn]:
        count = (num_turns or {}).get(record.generation, 1)
        return [make_turn(record, index=index) for index in range(count)]

    algo = algo or AlgoConfig.model_validate({"advantage": "group_mean", **settings})
    turns = {record.id: chain(record) for record in records}
    return settle_group(make_task(num_generations=len(records)), records, turns, algo=algo, min_turns=min_turns)


def trained(rows: Sequence[DBRecordData]) -> list[int]:
    return [int(row.record_id.rpartition("/g")[2]) for row in rows]


# --- efficient_rewarding --------------------------------------------------------------------------------------------


@given(Scored)
def test_shifts_stay_within_a_tenth_and_cancel_out_in_each_half(group: list[tuple[float, int]]) -> None:
    scores = {str(index): score for index, (score, _) in enumerate(group)}
    rewards = efficient_rewards(scores, {str(index): turns for index, (_, turns) in enumerate(group)})
    shifts = {key: rewards[key] - scores[key] for key in scores}
    assert all(abs(shift) <= LARGEST_SHIFT + 1e-12 for shift in shifts.values())
    for half in (True, False):
        assert sum(shift for key, shift in shifts.items() if is_right(scores[key]) is half) == pytest.approx(0)


@given(Scored)
def test_fewer_turns_are_better_for_right_answers_and_worse_for_wrong_ones(group: list[tuple[float, int]]) -> None:
    scores = {str(index): score for index, (score, _) in enumerate(group)}
    num_turns = {str(index): turns for index, (_, turns) in enumerate(group)}
    rewards = efficient_rewards(scores, num_turns)
    if len(set(scores.values())) < 2:
        assert rewards == scores
        return
    for one in scores:
        for other in scores:
            if is_right(scores[one]) is not is_right(scores[other]):
                continue
            gain = (rewards[one] - scores[one]) - (rewards[other] - scores[other])
            longer = num_turns[one] - num_turns[other]
            if longer == 0:
                assert gain == pytest.approx(0)
            else:
                assert gain * longer * (-1 if is_right(scores[one]) else 1) > 0


def test_ranks_count_not_the_turns_themselves_and_ties_share_their_mean_rank() -> None:
    scores = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0, "e": 0.0}
    rewards = efficient_rewards(scores, {"a": 1, "b": 2, "c": 2, "d": 90, "e": 5})
    assert rewards == pytest.approx({"a": 1.1, "b": 1.0, "c": 1.0, "d": 0.9, "e": 0.0})


def test_efficient_rewarding_changes_rewards_and_advantages_and_leaves_the_scores() -> None:
    records = [record_of(0, 1.0), record_of(1, 1.0), record_of(2, 0.0), record_of(3, 0.0)]
    num_turns = {0: 1, 1: 4, 2: 2, 3: 3}
    plain, _ = settle(records, num_turns=num_turns)
    shaped, rows = settle(records, num_turns=num_turns, efficient_rewarding=True)
    assert list(shaped.scores.values()) == list(plain.scores.values()) == [1.0, 1.0, 0.0, 0.0]
    assert list(plain.rewards.values()) == [1.0, 1.0, 0.0, 0.0]
    assert list(shaped.rewards.values()) == pytest.approx([1.1, 0.9, -0.1, 0.1])
    assert list(shaped.advantages.values()) == pytest.approx([0.6, 0.4, -0.6, -0.4])
    assert [row.reward for row in rows] == pytest.approx([1.1, 0.9, -0.1, 0.1])
    assert [float(row.advantages[row.loss_mask][0]) for row in rows] == pytest.approx([0.6, 0.4, -0.6, -0.4])


def test_a_group_that_is_all_right_gets_no_signal_from_its_lengths() -> None:
    settlement, rows = settle([record_of(0, 1.0), record_of(1, 1.0)], num_turns={0: 1, 1: 5}, efficient_rewarding=True)
    assert (settlement.drop_reason, rows) == ("zero_advantage", [])


def test_failures_take_no_part_in_the_ranking() -> None:
    records = [record_of(0, 1.0), record_of(1, None, stop=StopReason.ENGINE_ERROR), record_of(2, 1.0), record_of(3, 0)]
    settlement, _ = settle(records, num_turns={0: 1, 1: 2, 2: 3, 3: 1}, efficient_rewarding=True)
    assert settlement.rewards == pytest.approx({records[0].id: 1.1, records[2].id: 0.9, records[3].id: 0.0})


def test_held_out_groups_are_never_shaped() -> None:
    task = make_task(split="eval")
    records = [
        make_record(task, generation=g, status=RecordStatus.FINISHED, stop_reason=StopReason.ANSWER, score=score)
        for g, score in enumerate([1.0, 1.0, 0.0])
    ]
    turns = {record.id: [make_turn(record)] * (record.generation + 1) for record in records}
    settlement, _ = settle_group(task, records, turns, algo=AlgoConfig(efficient_rewarding=True), min_turns=0)
    assert settlement.rewards == settlement.scores == {record.id: record.score for record in records}


# --- balance_sample -------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from([0.0, 0.2, 0.9, 1.0]), max_size=16), st.text(max_size=5))
def test_balance_keeps_m_plus_1_wrong_and_m_plus_2_right(values: list[float], seed: str) -> None:
    scores = {f"r{index}": score for index, score in enumerate(values)}
    num_right = sum(map(is_right, values))
    num_wrong = len(values) - num_right
    smaller = min(num_right, num_wrong)
    kept = {
        key: score for key, score in scores.items() if key not in surplus_of_balance(scores, excluded=set(), seed=seed)
    }
    assert sum(map(is_right, kept.values())) == min(num_right, smaller + 2)
    assert sum(not is_right(score) for score in kept.values()) == min(num_wrong, smaller + 1)


def test_the_balanced_choice_depends_on_the_task_alone_and_differs_between_tasks() -> None:
    scores = {f"r{index}": float(index == 0) for index in range(12)}
    backwards = dict(reversed(scores.items()))
    first = surplus_of_balance(scores, excluded=set(), seed="train:0:q1")
    assert first == surplus_of_balance(backwards, excluded=set(), seed="train:0:q1")
    others = {frozenset(surplus_of_balance(scores, excluded=set(), seed=f"train:0:q{index}")) for index in range(20)}
    assert len(others) > 1


def test_balance_counts_no_failure_and_leaves_the_baseline_alone() -> None:
    wrong = [record_of(index, 0.0) for index in range(5)]
    failed = [record_of(index, None, stop=StopReason.TOOL_ERROR) for index in (5, 6)]
    records = [*wrong, *failed, record_of(7, 1.0)]
    plain, _ = settle(records)
    settlement, rows = settle(records, balance_sample=True)
    assert settlement.advantages == plain.advantages
    assert settlement.num_failed == 2
    assert len(rows) == 3  # m = 1: two wrong, and the only right one
    assert 7 in trained(rows)
    assert sorted(settlement.untrained.values()) == ["unbalanced"] * 3


def test_balance_is_off_by_default() -> None:
    records = [record_of(index, 0.0) for index in range(7)]
    _, rows = settle([*records, record_of(7, 1.0)])
    assert len(rows) == 8


# --- min_turns, reserve_context_error_count --------------------------------------------------------------------------


@pytest.mark.parametrize(("num_turns", "is_short"), [(1, True), (2, False), (3, False)])
def test_min_turns_means_fewer_than(num_turns: int, is_short: bool) -> None:
    record = record_of(0, 1.0)
    assert bool(short_successes([record], {record.id: num_turns}, min_turns=2)) is is_short
    wrong = record_of(0, 0.0)
    assert short_successes([wrong], {wrong.id: num_turns}, min_turns=2) == set()


@pytest.mark.parametrize("keep", [0, 1, 2, 5])
def test_of_the_records_a_limit_stopped_a_random_n_are_trained_and_all_are_in_the_baseline(keep: int) -> None:
    stopped = [record_of(0, 0.0, stop=StopReason.MAX_TURNS), record_of(1, 0.0, stop=StopReason.CONTEXT_LIMIT)]
    stopped.append(record_of(2, 0.0, stop=StopReason.MAX_TURNS))
    records = [*stopped, record_of(3, 1.0), record_of(4, 0.0, stop=StopReason.REPETITION)]
    plain, _ = settle(records)
    settlement, rows = settle(records, reserve_context_error_count=keep)
    assert settlement.advantages == plain.advantages
    assert len(rows) == 2 + min(keep, 3)
    assert {3, 4} <= set(trained(rows))
    assert set(settlement.untrained.values()) <= {"context_error"}
    assert surplus_context_errors(records, keep=keep, seed="t") == surplus_context_errors(
        records[::-1], keep=keep, seed="t"
    )


def test_without_the_setting_records_a_limit_stopped_are_trained_like_any_other() -> None:
    _, rows = settle([record_of(0, 0.0, stop=StopReason.MAX_TURNS), record_of(1, 1.0)])
    assert trained(rows) == [0, 1]


def test_balance_counts_only_records_that_no_other_rule_leaves_out() -> None:
    stopped = [record_of(index, 0.0, stop=StopReason.MAX_TURNS) for index in range(4)]
    records = [*stopped, record_of(4, 0.0), *(record_of(index, 1.0) for index in (5, 6, 7))]
    settlement, rows = settle(records, balance_sample=True, reserve_context_error_count=0)
    assert trained(rows) == [4, 5, 6, 7]  # m = 1, by the one wrong Record that is left
    assert sorted(settlement.untrained.values()) == ["context_error"] * 4


# --- advantages ------------------------------------------------------------------------------------------------------

FOUR = [record_of(0, 1.0), record_of(1, 0.6), record_of(2, 0.4), record_of(3, 0.0)]  # advantages 0.5 0.1 -0.1 -0.5


@pytest.mark.parametrize(
    ("minimum", "expected"), [(None, [0, 1, 2, 3]), (0.0, [0, 1]), (0.2, [0]), (-0.2, [0, 1, 2]), (0.6, [])]
)
def test_minimal_advantage_is_a_signed_bound_and_zero_is_a_value(minimum: float | None, expected: list[int]) -> None:
    settlement, rows = settle(FOUR, minimal_advantage=minimum)
    assert trained(rows) == expected
    assert settlement.drop_reason == (None if expected else "minimal_advantage")


def test_an_advantage_equal_to_the_minimum_is_trained() -> None:
    _, rows = settle([record_of(0, 1.0), record_of(1, 0.0)], minimal_advantage=0.5)
    assert trained(rows) == [0]


def test_skip_non_positive_advantage_trains_only_what_is_better_than_its_group() -> None:
    settlement, rows = settle(FOUR, skip_non_positive_advantage=True)
    assert trained(rows) == [0, 1]
    assert settlement.untrained == dict.fromkeys([FOUR[2].id, FOUR[3].id], "non_positive_advantage")
    zeros = [replace(record, score=0.5) for record in FOUR]
    settlement, rows = settle(zeros, skip_non_positive_advantage=True, drop_zero_advantage=False)
    assert (settlement.drop_reason, rows) == ("non_positive_advantage", [])


def test_a_group_without_rows_is_dropped_for_the_last_reason_of_its_records() -> None:
    records = [record_of(0, 1.0), record_of(1, 0.5), record_of(2, 0.0, stop=StopReason.MAX_TURNS)]
    settlement, rows = settle(records, min_turns=2, reserve_context_error_count=0)
    assert rows == []
    assert list(settlement.untrained.values()) == ["min_turns", "zero_advantage", "context_error"]
    assert (settlement.outcome, settlement.drop_reason) == (GroupOutcome.DROPPED, "context_error")
