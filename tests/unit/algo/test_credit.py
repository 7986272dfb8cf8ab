from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl.algo.advantages import reinforce_pp_advantages
from agentrl.algo.credit import episodes_of, group_credit, turn_scores_of
from agentrl.algo.settle import settle_group
from agentrl.config.sections import AlgoConfig
from agentrl.types import (
    DBRecordData,
    EpisodeResult,
    GroupOutcome,
    GroupSettlement,
    Record,
    RecordStatus,
    StopReason,
    Turn,
)
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
        ({"advantage": "mt_grpo_pooled", "gamma": 0.9}, "nothing to discount"),
        ({"advantage": "rloo", "outcome_weight": 1.0}, "no credit per episode"),
        ({"advantage": "turn_rloo", "turn_weight": 0.0}, "every advantage would be 0"),
        ({"advantage": "turn_rloo", "distinct_answer_penalty": 0.1}, "which is 0; raise outcome_weight"),
        ({"advantage": "turn_rloo", "episode_reward_mask": [0.0, 0.0]}, "all zeros"),
        (
            {"advantage": "turn_rloo", "episode_reward_mask": [0, 1], "turn_weight": 0, "outcome_weight": 1},
            "nothing is left to mask",
        ),
        ({"advantage": "reinforce_plus_plus", "minimal_advantage": 0.0}, "known only in the optimizer step"),
        ({"advantage": "reinforce_plus_plus_baseline", "skip_non_positive_advantage": True}, "known only"),
    ],
)
def test_settings_that_contradict_the_advantage_method_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AlgoConfig.model_validate(settings)


def meta_record(generation: int, scores: Sequence[float], *, answers: Sequence[str | None] = ()) -> Record:
    """A finished meta-episode; each episode is two turns."""
    episodes = tuple(
        EpisodeResult(
            answer=answers[number] if answers else str(number), score=score, stop_reason=StopReason.ANSWER,
            num_turns=2, num_tool_calls=1, num_completion_tokens=4,
        )
        for number, score in enumerate(scores)
    )  # fmt: skip
    record = record_of(generation, *turn_scores_of(episodes), score=scores[-1])
    return replace(record, episodes=episodes)


def by_episode(rewards: Sequence[Sequence[float]], **algo: object) -> list[list[float]]:
    """The credit of each episode of a group of meta-episodes: that of both its turns."""
    records = [meta_record(generation, row) for generation, row in enumerate(rewards)]
    turns = {record.id: turns_of(record, len(record.turn_scores)) for record in records}
    config = AlgoConfig.model_validate({"advantage": "turn_rloo"} | algo)
    credit = group_credit(records, turns, rewards={r.id: r.score or 0.0 for r in records}, algo=config)
    found = [credit[record.id].of_turns for record in records]
    assert [row[::2] for row in found] == [row[1::2] for row in found]
    return [[float(value) for value in row[::2]] for row in found]


def nearly(rows: Sequence[Sequence[float]]) -> list[object]:
    return [pytest.approx(list(row), abs=1e-9) for row in rows]


EX1, EX4 = MR_SEARCH["EX1"], MR_SEARCH["EX4"]


def test_the_exploration_mask_is_a_setting() -> None:
    assert by_episode(EX4["R"], episode_reward_mask=EX4["m"]) == nearly(EX4["A_gamma1"])


def test_an_outcome_term_is_added_to_every_episode() -> None:
    wanted = [[1.5, 1.75, 1], [0.25, 0.5, 1], [2.75, 1.75, 1], [-2.25, -2, -1.5], [-2.25, -2, -1.5]]
    assert by_episode(EX1["R"], outcome_weight=1.0) == nearly(wanted)
    outcomes = [0.5, 0.5, 0.5, -0.75, -0.75]
    alone = by_episode(EX1["R"], turn_weight=0.0, outcome_weight=2.0)
    assert alone == nearly([[2 * value] * 3 for value in outcomes])


def test_mt_grpo_is_a_z_score_per_turn_or_over_all_of_them() -> None:
    per_turn = by_episode(EX1["R"], advantage="mt_grpo_turn", gamma=0.0)
    for row, wanted in (
        (0, [-0.4472, 1.0954, 0.7303]),
        (2, [1.7889, 1.0954, 0.7303]),
        (3, [-0.4472, -0.7303, -1.0954]),
    ):
        assert per_turn[row] == pytest.approx(wanted, abs=1e-4)
    discounted = by_episode(EX1["R"], advantage="mt_grpo_turn")
    assert discounted == nearly([list(np.cumsum(row[::-1])[::-1]) for row in per_turn])
    pooled = by_episode(EX1["R"], advantage="mt_grpo_pooled")
    assert pooled == [[pytest.approx(1.1832 if reward else -0.7888, abs=1e-4) for reward in row] for row in EX1["R"]]
    masked = by_episode(EX1["R"], advantage="mt_grpo_pooled", episode_reward_mask=[0, 0, 1])
    assert masked == nearly([[0.0, 0.0, row[2]] for row in pooled])


def test_the_improvement_bonus_rewards_what_an_episode_adds_to_the_one_before() -> None:
    rewards = [[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]]
    bonus = [[0.0, 1.5, 1.0], [1.5, -0.5, 0.0]]
    assert by_episode(rewards, improvement_bonus=0.5) == nearly(by_episode(bonus))


def test_repeated_answers_are_taken_from_the_outcome() -> None:
    """Generation 0 says one thing three times, generation 1 two things and once nothing."""
    records = [
        meta_record(0, [0.0, 0.0, 1.0], answers=["Paris", " paris", "PARIS"]),
        meta_record(1, [0.0, 0.0, 1.0], answers=["Rome", None, "Paris"]),
    ]
    _, rows = settle(records, advantage="turn_rloo", turn_weight=0.0, outcome_weight=1.0, distinct_answer_penalty=0.3)
    assert credited(rows[0])[0] == pytest.approx(-0.1)
    assert credited(rows[1])[0] == pytest.approx(0.1)


def test_an_episode_without_tokens_is_in_the_baseline_and_in_what_came_before() -> None:
    lost = EpisodeResult(
        answer=None, score=0.0, stop_reason=StopReason.CONTEXT_LIMIT, num_turns=0, num_tool_calls=0,
        num_completion_tokens=0,
    )  # fmt: skip
    begun = meta_record(0, [1.0, 0.0])
    short = replace(meta_record(0, [1.0]), episodes=(*meta_record(0, [1.0]).episodes, lost), score=0.0)
    other = meta_record(1, [0.0, 0.5])
    settlement, rows = settle([short, other], advantage="turn_rloo")
    _, wanted = settle([begun, other], advantage="turn_rloo")
    assert settlement.episode_scores == {short.id: (1.0, 0.0), other.id: (0.0, 0.5)}
    assert credited(rows[0]) == credited(wanted[0])[:4]
    assert credited(rows[1]) == credited(wanted[1])


def test_episodes_that_do_not_add_up_to_their_record_are_refused() -> None:
    with pytest.raises(ValueError, match="g0 has 3 turns, its 2 episodes 4 turns and 2 scores"):
        episodes_of(meta_record(0, [0.0, 1.0]), num_turns=3, reward=1.0)


def independent_credit(
    rewards: Sequence[Sequence[float]], *, gamma: float, mask: Sequence[float], alpha: float, beta: float, bonus: float
) -> list[list[float]]:
    """The definition, written over the whole matrix at once with NaN where a Record has no such episode."""
    width = max(len(row) for row in rewards)
    raw = np.array([[*row, *[np.nan] * (width - len(row))] for row in rewards])
    shaped = raw + bonus * (raw - np.concatenate([np.zeros((len(raw), 1)), raw[:, :-1]], axis=1))
    present = ~np.isnan(raw)
    counts = present.sum(axis=0)
    others = np.nansum(shaped, axis=0) - shaped
    relative = np.where(present & (counts > 1), shaped - others / np.maximum(counts - 1, 1), 0.0)
    powers = gamma ** np.maximum(np.subtract.outer(np.arange(width), np.arange(width)), 0)
    later = np.tril(np.ones((width, width))) * powers  # [later, earlier]
    turn_term = (relative * np.asarray(mask[:width])) @ later
    last = np.array([row[-1] for row in rewards])
    outcome = last - (last.sum() - last) / (len(last) - 1) if len(last) > 1 else np.zeros(1)
    total = beta * turn_term + alpha * outcome[:, None]
    return [total[i, : len(row)].tolist() for i, row in enumerate(rewards)]


def test_a_thousand_ragged_groups_agree_with_an_independent_formula() -> None:
    random = np.random.default_rng(0)
    for _ in range(1000):
        rewards = [
            (random.integers(0, 2, size) if random.random() < 0.5 else random.normal(size=size)).astype(float).tolist()
            for size in random.integers(1, 6, random.integers(1, 7))
        ]
        mask = random.integers(0, 2, 5).astype(float)
        mask[random.integers(5)] = 1.0
        gamma, alpha, bonus = random.choice([0.0, 0.5, 0.9, 1.0]), random.choice([0.0, 1.0]), random.choice([0.0, 0.5])
        wanted = independent_credit(rewards, gamma=gamma, mask=mask, alpha=alpha, beta=0.5, bonus=bonus)
        shaping = {"gamma": gamma, "outcome_weight": alpha, "turn_weight": 0.5, "improvement_bonus": bonus}
        assert by_episode(rewards, episode_reward_mask=mask.tolist(), **shaping) == nearly(wanted)


full_groups = st.integers(1, 4).flatmap(
    lambda width: st.lists(
        st.lists(st.integers(-8, 8).map(lambda value: value / 8), min_size=width, max_size=width),
        min_size=2,
        max_size=5,
    )
)


@settings(max_examples=60, deadline=None)
@given(rewards=full_groups, shift=st.integers(-3, 3), scale=st.sampled_from([0.5, 2.0, 3.0]), data=st.data())
def test_properties_of_turn_level_credit(
    rewards: list[list[float]], shift: int, scale: float, data: st.DataObject
) -> None:
    relative = np.array(by_episode(rewards, gamma=0.0))
    full = np.array(by_episode(rewards))
    assert relative.sum(axis=0) == pytest.approx(0.0, abs=1e-9)
    shifted = [[value + (shift if n == 0 else 0) for n, value in enumerate(row)] for row in rewards]
    assert np.array(by_episode(shifted, gamma=0.0)) == pytest.approx(relative, abs=1e-9)
    order = data.draw(st.permutations(range(len(rewards))))
    assert np.array(by_episode([rewards[i] for i in order])) == pytest.approx(full[list(order)], abs=1e-9)
    assert full[:, -1] == pytest.approx(relative[:, -1], abs=1e-9)
    scaled = by_episode([[scale * value for value in row] for row in rewards])
    assert np.array(scaled) == pytest.approx(scale * full, abs=1e-9)
    totals = by_episode([[sum(row)] for row in rewards])
    assert full[:, 0] == pytest.approx(np.array(totals)[:, 0], abs=1e-9)


def test_equal_rewards_and_a_group_of_one_earn_nothing() -> None:
    assert by_episode([[1.0, 0.0]] * 3) == [[0.0, 0.0]] * 3
    assert by_episode([[1.0, 0.0]]) == [[0.0, 0.0]]
