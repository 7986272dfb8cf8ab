"""What sampling achieved in the groups of a step: rewards, failures, signal, lengths. Part of the step's metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from agentrl.algo.watch import length_reward_correlation
from agentrl.types import GroupOutcome, SettledGroup


def group_metrics(groups: Sequence[SettledGroup]) -> dict[str, float]:
    """The numbers of all groups of a step, for its ledger entry. Failed Records have no score and enter no mean.

    `num_untrained_<reason>` counts scored Records without rows, of dropped and of trained groups.
    """
    trainable = [group for group in groups if group.settlement.outcome is GroupOutcome.TRAINABLE]
    rewards = [reward for group in groups for reward in group.settlement.rewards.values()]
    scores = [score for group in groups for score in group.settlement.scores.values()]
    untrained = Counter(reason for group in groups for reason in group.settlement.untrained.values())
    trained_rewards = [reward for group in trainable for reward in group.settlement.rewards.values()]
    metrics = {
        "num_groups": float(len(groups)),
        "num_scored": float(len(rewards)),
        "num_failed": float(sum(group.settlement.num_failed for group in groups)),
        "group_signal_share": len(trainable) / max(len(groups), 1),
        "tool_calls_mean": float(np.mean([group.mean_tool_calls for group in groups])) if groups else 0.0,
    }
    metrics.update((f"num_untrained_{reason}", float(count)) for reason, count in sorted(untrained.items()))
    if scores:
        metrics["score"] = float(np.mean(scores))
    if rewards:
        metrics["reward"] = float(np.mean(rewards))
    metrics.update(_episode_metrics(groups))
    if trained_rewards:
        completion_tokens = sum(row.num_trained_tokens for group in trainable for row in group.sequences)
        metrics["reward_trained"] = float(np.mean(trained_rewards))
        metrics["completion_tokens_mean"] = completion_tokens / len(trained_rewards)
        correlation = length_reward_correlation([_lengths_and_rewards(group) for group in trainable])
        if correlation is not None:
            metrics["length_reward_correlation"] = correlation
    return metrics


def _episode_metrics(groups: Sequence[SettledGroup]) -> dict[str, float]:
    """`score_episode_<n>`, from 1: the mean score of the n-th episode over the meta-episodes that have one."""
    columns: dict[int, list[float]] = {}
    for group in groups:
        for scores in group.settlement.episode_scores.values():
            for number, score in enumerate(scores, start=1):
                columns.setdefault(number, []).append(score)
    return {f"score_episode_{number}": float(np.mean(scores)) for number, scores in sorted(columns.items())}


def _lengths_and_rewards(group: SettledGroup) -> list[tuple[float, float]]:
    """Trained tokens and reward of every Record of a group that gave rows."""
    lengths: Counter[str] = Counter()
    for row in group.sequences:
        lengths[row.id.rpartition("/s")[0]] += row.num_trained_tokens
    rewards = group.settlement.rewards
    return [(float(length), rewards[record_id]) for record_id, length in lengths.items() if record_id in rewards]
