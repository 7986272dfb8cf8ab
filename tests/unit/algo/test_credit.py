from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl.algo.advantages import reinforce_pp_advantages
from agentrl.algo.credit import episodes_of, group_credit
from agentrl.algo.settle import settle_group
from agentrl.config.sections import AlgoConfig
from agentrl.types import DBRecordData, GroupOutcome, GroupSettlement, Record, RecordStatus, StopReason, Turn
from factories import make_record, make_task, make_turn

MR_SEARCH = json.loads((Path(__file__).parents[2] / "data" / "mr_search.json").read_text(encoding="utf-8"))
TASK = make_task(num_generations=5)


def record_of(generation: int, *turn_scores: float | None, score: float | None = None) -> Record:
    """A finished Record; its score is that of its last scored turn unless given."""
    scores = [value for value in turn_scores if value is not None]
    record = make_record(
        TASK,
        generation=generation,
        status=RecordStatus.FINISHED,
        stop_reason=StopReason.ANSWER,
        score=scores[-1] if score is None else score,
    )
    return replace(record, turn_scores=turn_scores)


def turns_of(record: Record, num_turns: int) -> list[Turn]:
    """Three new prompt tokens and two sampled ones per turn."""
    return [make_turn(record, index=index) for index in range(num_turns)]


def settle(records: Sequence[Record], **algo: object) -> tuple[GroupSettlement, list[DBRecordData]]:
    turns = {record.id: turns_of(record, max(len(record.turn_scores), 1)) for record in records}
    config = AlgoConfig.model_validate(algo)
    return settle_group(TASK, records, turns, algo=config, min_turns=0)


def credited(row: DBRecordData) -> list[float]:
    return row.advantages[row.loss_mask].tolist()


@pytest.mark.parametrize(
    ("example", "gamma", "key"),
    [
        ("EX1", 1.0, "A_gamma1"),
        ("EX1", 0.5, "A_gamma0.5"),
        ("EX1", 0.0, "A_gamma0"),
        ("EX2", 0.9, "A_gamma0.9"),
        ("EX3", 1.0, "A_gamma1"),
    ],
)
def test_golden_episode_credit_reaches_every_token_of_its_turns(example: str, gamma: float, key: str) -> None:
    """Each episode is two turns: a search and an answer that is scored."""
    rewards = [[value for value in row if value is not None] for row in MR_SEARCH[example]["R"]]
    records = [
        record_of(generation, *[value for reward in row for value in (None, reward)])
        for generation, row in enumerate(rewards)
    ]
    turns = {record.id: turns_of(record, len(record.turn_scores)) for record in records}
    algo = AlgoConfig(advantage="turn_rloo", gamma=gamma)
    credit = group_credit(records, turns, rewards={r.id: r.score or 0.0 for r in records}, algo=algo)
    for record, expected in zip(records, MR_SEARCH[example][key], strict=True):
        wanted = [value for value in expected if value is not None]
        assert credit[record.id].of_turns == pytest.approx([v for value in wanted for v in (value, value)], abs=1e-9)


def test_turn_level_credit_is_in_the_rows_token_by_token() -> None:
    records = [record_of(0, None, 0.0, 1.0), record_of(1, 0.0, None, 0.0)]
    settlement, rows = settle(records, advantage="turn_rloo", gamma=0.5)
    # episode 0: 0 against 0; episode 1: 1 against 0. Generation 0 has turns 0-1 in episode 0, generation 1 turn 0 only.
    assert credited(rows[0]) == [0.5, 0.5, 0.5, 0.5, 1.0, 1.0]
    assert credited(rows[1]) == [-0.5, -0.5, -1.0, -1.0, -1.0, -1.0]
    assert not rows[0].advantages[~rows[0].loss_mask].any()
    assert list(settlement.advantages.values()) == pytest.approx([4 / 6, -5 / 6])


def test_without_turn_scores_a_record_is_one_episode_and_turn_level_is_rloo() -> None:
    records = [replace(record_of(g, score), turn_scores=()) for g, score in enumerate([1.0, 0.0, 0.0])]
    by_turn, by_record = settle(records, advantage="turn_rloo"), settle(records, advantage="rloo")
    assert by_turn[0] == by_record[0]
    assert [credited(row) for row in by_turn[1]] == [credited(row) for row in by_record[1]]


def test_credit_that_cancels_out_over_a_record_is_still_trained() -> None:
    records = [record_of(0, 1.0, 0.0), record_of(1, 0.0, 1.0)]
    settlement, rows = settle(records, advantage="turn_rloo", gamma=0.0)
    assert list(settlement.advantages.values()) == [0.0, 0.0]
    assert settlement.outcome is GroupOutcome.TRAINABLE
    assert [credited(row) for row in rows] == [[1.0, 1.0, -1.0, -1.0], [-1.0, -1.0, 1.0, 1.0]]


def test_turns_after_the_last_score_are_an_episode_without_reward() -> None:
    found = episodes_of(record_of(0, None, 1.0, None, None), num_turns=4, reward=1.0)
    assert found.rewards == (1.0, 0.0)
    assert found.of_turns == (0, 0, 1, 1)


def test_what_shaping_adds_goes_to_the_last_episode() -> None:
    assert episodes_of(record_of(0, 0.0, 1.0), num_turns=2, reward=1.1).rewards == pytest.approx((0.0, 1.1))


def test_turn_scores_that_are_not_one_per_turn_are_refused() -> None:
    with pytest.raises(ValueError, match=r"g0 has 2 turn_scores for 3 turns"):
        episodes_of(record_of(0, 0.0, 1.0), num_turns=3, reward=1.0)


def test_reinforce_pp_returns_pass_through_tool_tokens_and_are_discounted_by_time() -> None:
    (row, *_), gamma = settle([record_of(0, None, 1.0)], advantage="reinforce_plus_plus", gamma=0.9)[1], 0.9
    # P P P A A | T T T B B, rewarded at the last B
    assert credited(row) == pytest.approx([gamma**6, gamma**5, gamma, 1.0])
    assert settle([record_of(0, None, 1.0)], advantage="reinforce_plus_plus")[0].advantages == {f"{TASK.id}/g0": 1.0}


@given(
    scores=st.lists(st.lists(st.sampled_from([None, 0.0, 0.5, 1.0]), min_size=1, max_size=4), min_size=1, max_size=4),
    gamma=st.sampled_from([1.0, 0.9]),
)
def test_reinforce_pp_rows_hold_what_the_advantage_function_starts_from(
    scores: list[list[float | None]], gamma: float
) -> None:
    """Whitening the rows' returns over all of them gives reinforce_pp_advantages of the same token rewards."""
    records = [record_of(g, *row, score=0.0) for g, row in enumerate(scores)]
    _, rows = settle(records, advantage="reinforce_plus_plus", gamma=gamma)
    token_rewards = []
    for row, given_scores in zip(rows, scores, strict=True):
        rewards = np.zeros(row.token_ids.size)
        rewards[4::5] = [value or 0.0 for value in given_scores]
        token_rewards.append(rewards.tolist())
    expected = reinforce_pp_advantages(token_rewards, [row.loss_mask.tolist() for row in rows], gamma=gamma)
    returns = np.concatenate([row.advantages[row.loss_mask].astype(np.float64) for row in rows])
    whitened = (returns - returns.mean()) / np.sqrt(returns.var(ddof=1) + 1e-8)
    wanted = np.concatenate([np.asarray(row)[made.loss_mask] for row, made in zip(expected, rows, strict=True)])
    assert whitened.tolist() == pytest.approx(wanted.tolist(), abs=2e-3 if returns.std() < 1e-3 else 1e-5)


def test_a_wrong_record_is_trained_under_reinforce_pp_although_its_return_is_zero() -> None:
    settlement, rows = settle([record_of(0, 0.0), record_of(1, 1.0)], advantage="reinforce_plus_plus")
    assert [credited(row) for row in rows] == [[0.0, 0.0], [1.0, 1.0]]
    assert not settlement.untrained


def test_the_baseline_variant_subtracts_the_groups_mean_return() -> None:
    _, rows = settle([record_of(0, 0.0, 1.0), record_of(1, 1.0, 1.0)], advantage="reinforce_plus_plus_baseline")
    assert [credited(row) for row in rows] == [[-0.5] * 4, [0.5] * 4]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"advantage": "group_norm", "gamma": 0.9}, "nothing to discount"),
        ({"advantage": "reinforce_plus_plus", "minimal_advantage": 0.0}, "known only in the optimizer step"),
        ({"advantage": "reinforce_plus_plus_baseline", "skip_non_positive_advantage": True}, "known only"),
    ],
)
def test_settings_that_contradict_the_advantage_method_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AlgoConfig.model_validate(settings)
