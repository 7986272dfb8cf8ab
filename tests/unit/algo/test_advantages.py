from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algo.advantages import (
    batch_std_advantages,
    group_advantages,
    reinforce_pp_advantages,
    turn_level_advantages,
)
from golden_losses import golden_case, golden_file

MR_SEARCH = json.loads((Path(__file__).parents[2] / "data" / "mr_search.json").read_text(encoding="utf-8"))
METHODS = ["group_norm", "group_mean", "rloo", "leave_one_out_sign_clip"]
rewards_of_a_group = st.lists(st.floats(-10, 10).map(lambda value: round(value, 3)), min_size=2, max_size=8)

CASES: dict[str, dict[str, Any]] = {
    "adv_group_norm_std_eps1e-6": {"method": "group_norm", "singleton": "reward"},
    "adv_group_mean_only": {"method": "group_mean", "singleton": "reward"},
    "adv_rloo": {"method": "rloo", "singleton": "reward"},
    "adv_group_norm_std_eps1e-6_zero_var_and_singleton": {"method": "group_norm", "singleton": "reward"},
    "adv_rloo_singleton_zero": {"method": "rloo"},
    "adv_agentrl_loo_signclip_scale2": {"method": "leave_one_out_sign_clip"},
}


def by_group(case: dict[str, Any]) -> list[list[float]]:
    groups: dict[int, list[float]] = {}
    for reward, group in zip(case["rewards"], case["group_ids"], strict=True):
        groups.setdefault(group, []).append(reward)
    return list(groups.values())


@pytest.mark.parametrize("name", CASES)
def test_golden_group_advantages_are_reproduced(name: str) -> None:
    case = golden_case(name)
    scaling = case["options"].get("adv_scaling", 1.0)
    actual = [a * scaling for group in by_group(case) for a in group_advantages(group, **CASES[name])]
    assert actual == pytest.approx(case["expected"]["advantages"], abs=1e-9)


def test_golden_batch_std_advantages_are_reproduced() -> None:
    case = golden_case("adv_group_mean_batch_std_eps1e-4")
    actual = [advantage for group in batch_std_advantages(by_group(case), eps=1e-4) for advantage in group]
    assert actual == pytest.approx(case["expected"]["advantages"], abs=1e-9)


def test_golden_reinforce_pp_baseline_is_reproduced() -> None:
    case = golden_case("adv_reinforce_pp_baseline")
    masks = [[value == 1.0 for value in row] for row in golden_file()["inputs"][case["input"]]["mask"]]
    actual = reinforce_pp_advantages(case["token_level_rewards"], masks, group_ids=case["group_ids"])
    for row, expected in zip(actual, case["expected"]["advantages"], strict=True):
        assert row == pytest.approx(expected, abs=1e-9)


def test_every_advantage_case_of_the_file_is_covered() -> None:
    names = {case["name"] for case in golden_file()["cases"] if case["family"] == "advantages"}
    assert names == CASES.keys() | {"adv_group_mean_batch_std_eps1e-4", "adv_reinforce_pp_baseline"}


@pytest.mark.parametrize(
    ("example", "gamma", "expected"),
    [
        ("EX1", 1.0, "A_gamma1"),
        ("EX1", 0.5, "A_gamma0.5"),
        ("EX1", 0.0, "A_gamma0"),
        ("EX2", 1.0, "A_gamma1"),
        ("EX2", 0.9, "A_gamma0.9"),
        ("EX3", 1.0, "A_gamma1"),
        ("EX4", 1.0, "A_gamma1"),
    ],
)
def test_golden_turn_level_advantages_are_reproduced(example: str, gamma: float, expected: str) -> None:
    vectors = MR_SEARCH[example]
    rows = [[value for value in row if value is not None] for row in vectors["R"]]
    actual = turn_level_advantages(rows, gamma=gamma, credit_mask=vectors.get("m"))
    for row, wanted in zip(actual, vectors[expected], strict=True):
        assert row == pytest.approx([value for value in wanted if value is not None], abs=1e-9)


def test_turn_level_z_scores_are_per_episode() -> None:
    actual = turn_level_advantages(MR_SEARCH["EX1"]["R"], gamma=0.0, method="group_norm")
    assert actual[0] == pytest.approx([-0.4472, 1.0954, 0.7303], abs=1e-4)
    assert actual[2] == pytest.approx([1.7889, 1.0954, 0.7303], abs=1e-4)


def test_group_normalised_rewards_of_a_mixed_score_match_the_worked_example() -> None:
    example = MR_SEARCH["GRPO_miro"]
    assert group_advantages(example["R"]) == pytest.approx(example["z"], abs=1e-5)


@given(rewards=rewards_of_a_group)
@pytest.mark.parametrize("method", ["group_norm", "group_mean", "rloo"])
def test_advantages_of_a_group_sum_to_zero(method: str, rewards: list[float]) -> None:
    assert math.fsum(group_advantages(rewards, method=method)) == pytest.approx(0.0, abs=1e-6)


@given(rewards=rewards_of_a_group, shift=st.integers(-5, 5))
@pytest.mark.parametrize("method", ["group_norm", "group_mean", "rloo"])
def test_a_constant_shift_of_all_rewards_changes_nothing(method: str, rewards: list[float], shift: int) -> None:
    shifted = group_advantages([reward + shift for reward in rewards], method=method)
    assert shifted == pytest.approx(group_advantages(rewards, method=method), abs=1e-6)


@given(data=st.data(), rewards=rewards_of_a_group)
@pytest.mark.parametrize("method", METHODS)
def test_permuting_the_group_permutes_the_advantages(method: str, data: st.DataObject, rewards: list[float]) -> None:
    order = data.draw(st.permutations(range(len(rewards))))
    advantages = group_advantages(rewards, method=method)
    permuted = group_advantages([rewards[i] for i in order], method=method)
    assert permuted == pytest.approx([advantages[i] for i in order], abs=1e-9)


@given(rewards=rewards_of_a_group)
def test_leave_one_out_is_the_reward_minus_the_mean_of_the_others(rewards: list[float]) -> None:
    for i, advantage in enumerate(group_advantages(rewards, method="rloo")):
        others = rewards[:i] + rewards[i + 1 :]
        assert advantage == pytest.approx(rewards[i] - sum(others) / len(others), abs=1e-9)


@given(rewards=rewards_of_a_group)
def test_sign_clipping_never_rewards_a_wrong_answer_or_punishes_a_right_one(rewards: list[float]) -> None:
    for reward, advantage in zip(rewards, group_advantages(rewards, method="leave_one_out_sign_clip"), strict=True):
        assert advantage >= 0 if reward > 0.5 else advantage <= 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rewards", [[0.1, 0.1, 0.1], [0.7], []])
def test_a_group_without_spread_or_siblings_has_exact_zeros(method: str, rewards: list[float]) -> None:
    assert group_advantages(rewards, method=method) == [0.0] * len(rewards)


@given(
    rewards=st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=3, max_size=3), min_size=2, max_size=5),
)
def test_without_discount_the_first_episode_earns_the_rloo_of_the_total(rewards: list[list[float]]) -> None:
    actual = [row[0] for row in turn_level_advantages(rewards)]
    assert actual == pytest.approx(group_advantages([sum(row) for row in rewards], method="rloo"), abs=1e-9)


def test_returns_pass_through_tool_tokens() -> None:
    #        sampled  tool   sampled | sampled
    rewards = [[0.0, 0.0, 0.0, 1.0], [0.0]]
    masks = [[True, False, False, True], [True]]
    first, second = reinforce_pp_advantages(rewards, masks, gamma=0.5)
    returns = [0.125, 1.0, 0.0]  # of the three sampled tokens
    mean = sum(returns) / 3
    variance = sum((value - mean) ** 2 for value in returns) / 2
    whitened = [(value - mean) / math.sqrt(variance + 1e-8) for value in returns]
    assert first == pytest.approx([whitened[0], 0.0, 0.0, whitened[1]])
    assert second == pytest.approx([whitened[2]])


def test_whitening_survives_a_batch_without_trainable_tokens() -> None:
    assert reinforce_pp_advantages([[1.0]], [[False]]) == [[0.0]]
    assert reinforce_pp_advantages([], []) == []


def test_bad_arguments_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="finite"):
        group_advantages([1.0, float("nan")])
    with pytest.raises(ValueError, match="unknown group advantage"):
        group_advantages([1.0, 0.0], method="median")
    with pytest.raises(ValueError, match="credit_mask has 1 entries"):
        turn_level_advantages([[1.0, 0.0]], credit_mask=[1.0])
    assert batch_std_advantages([[1.0], []]) == [[0.0], []]
