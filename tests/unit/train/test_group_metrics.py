from collections.abc import Sequence
from dataclasses import replace

import pytest

from agentrl.train.group_metrics import group_metrics
from agentrl.types import GroupOutcome, GroupSettlement, SequenceSummary, SettledGroup
from factories import EPOCH_START


def settled(
    name: str,
    *,
    rewards: Sequence[float] = (1.0, 0.0),
    outcome: GroupOutcome = GroupOutcome.TRAINABLE,
    reason: str | None = None,
    num_failed: int = 0,
) -> SettledGroup:
    sequences = [
        SequenceSummary(id=f"{name}/g{k}/s0", num_tokens=20, num_trained_tokens=10, min_policy_version=0)
        for k in range(2)
    ]
    return SettledGroup(
        settlement=GroupSettlement(
            task_id=name,
            outcome=outcome,
            drop_reason=reason,
            rewards={f"{name}/g{k}": reward for k, reward in enumerate(rewards)},
            advantages={},
            num_failed=num_failed,
        ),
        sequences=tuple(sequences) if outcome is GroupOutcome.TRAINABLE else (),
        settled_at=EPOCH_START,
        mean_tool_calls=1.5,
    )


def test_reward_counts_dropped_groups_and_leaves_failed_records_out() -> None:
    groups = [
        settled("a", rewards=(1.0, 0.0)),
        settled("b", rewards=(1.0,), outcome=GroupOutcome.DROPPED, reason="zero_advantage", num_failed=1),
    ]

    metrics = group_metrics(groups)

    assert metrics["reward"] == pytest.approx(2 / 3)
    assert metrics["reward_trained"] == pytest.approx(0.5)
    assert metrics["num_failed"] == 1
    assert metrics["group_signal_share"] == 0.5
    assert metrics["completion_tokens_mean"] == 10
    assert metrics["tool_calls_mean"] == 1.5


def test_reward_is_left_out_where_nothing_was_scored() -> None:
    metrics = group_metrics([settled("a", rewards=(), outcome=GroupOutcome.DROPPED, reason="all_failed", num_failed=2)])

    assert "reward" not in metrics


def test_scores_by_episode_are_means_over_the_records_that_have_it() -> None:
    group = settled("a", rewards=(1.0, 0.0))
    scores = {"a/g0": (0.0, 1.0), "a/g1": (0.5,)}
    metrics = group_metrics([replace(group, settlement=replace(group.settlement, episode_scores=scores))])

    assert (metrics["score_episode_1"], metrics["score_episode_2"]) == (0.25, 1.0)
    assert "score_episode_3" not in metrics
