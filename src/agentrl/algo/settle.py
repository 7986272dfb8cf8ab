"""The decision on a complete group: who enters the baseline, who is trained, and if not, why.

    Records ─ without a score ─► num_failed (never a reward of 0)
       │
       └─ scored ─► scores ─► rewards ─► advantages ─► Records that are trained ─► rows
                      │                                    └─ none left ─► dropped: why the last one was not trained
                      └─ fewer than a baseline needs ────────────────────► dropped: too_few_scored

Score, reward and advantage are three numbers: the scorer's, after shaping, signed credit. Pure, so whoever settles a
group, and however often, decides the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum

from agentrl.algo.credit import Credit, group_credit
from agentrl.algo.group_policies import (
    efficient_rewards,
    short_successes,
    surplus_context_errors,
    surplus_of_balance,
)
from agentrl.algo.merge import merge_record
from agentrl.algo.suspects import engines_of
from agentrl.config.sections import AlgoConfig
from agentrl.scores import is_score
from agentrl.types import DBRecordData, GroupOutcome, GroupSettlement, Record, RecordStatus, Task, Turn

TRAIN_SPLIT_PREFIX = "train"


class DropReason(StrEnum):
    """Why a training group, or one of its Records, gives no rows. Closed; in the order of the checks."""

    TOO_FEW_SCORED = "too_few_scored"
    ZERO_ADVANTAGE = "zero_advantage"
    MINIMAL_ADVANTAGE = "minimal_advantage"
    NON_POSITIVE_ADVANTAGE = "non_positive_advantage"
    MIN_TURNS = "min_turns"
    CONTEXT_ERROR = "context_error"
    UNBALANCED = "unbalanced"
    NO_SAMPLED_TOKENS = "no_sampled_tokens"


def settle_group(
    task: Task,
    records: Sequence[Record],
    turns: Mapping[str, Sequence[Turn]],
    *,
    algo: AlgoConfig,
    min_turns: int,
    score_version: str | None = None,
) -> tuple[GroupSettlement, list[DBRecordData]]:
    """Advantages of a group and its training rows. `score_version`: whose scores the Records carry (score_versions.py).

    Records that the system ended, that failed or that have no usable score or `turn_scores` leave the baseline and
    count in `num_failed`, as do Records that are missing from the group. Splits that do not start with "train" are
    EVALUATED: scores only. Every other Record is in the baseline; those that give no rows are in `untrained` with their
    reason: zero advantage (while `drop_zero_advantage` is on), below `minimal_advantage`, not positive (with
    `skip_non_positive_advantage`), correct in fewer than `min_turns` turns, stopped by a limit beyond
    `reserve_context_error_count`, not picked by `balance_sample`, nothing sampled. A group without rows is dropped for
    the last of these reasons that any of its Records has.

    An advantage belongs to a token (`credit.py`); the settlement keeps each Record's mean. Advantages are stored
    unscaled: the loss applies `adv_scaling`.
    """
    scored = [record for record in records if is_scored(record) and has_fitting_turn_scores(record, turns[record.id])]
    scores = {record.id: float(record.score or 0.0) for record in scored}
    num_turns = {record.id: len(turns[record.id]) for record in scored}
    is_training = task.split.startswith(TRAIN_SPLIT_PREFIX)
    rewards = efficient_rewards(scores, num_turns) if is_training and algo.efficient_rewarding else scores
    undecided = GroupSettlement(
        task_id=task.id,
        outcome=GroupOutcome.DROPPED,
        rewards=rewards,
        advantages={},
        num_failed=max(task.num_generations, len(records)) - len(scored),
        scores=scores,
        episode_scores=_episode_scores(scored),
        engines=engines_of(turn for record in scored for turn in turns[record.id]),
        score_version=score_version,
    )
    if not is_training:
        return replace(undecided, outcome=GroupOutcome.EVALUATED), []
    if len(scored) < _smallest_group(algo):
        return replace(undecided, drop_reason=DropReason.TOO_FEW_SCORED.value), []
    credit = group_credit(scored, turns, rewards=rewards, algo=algo)
    untrained = _untrained(scored, credit, num_turns, task_id=task.id, algo=algo, min_turns=min_turns)
    rows: list[DBRecordData] = []
    for record in scored:
        if record.id in untrained:
            continue
        merged = merge_record(
            record, turns[record.id], reward=rewards[record.id], advantages=credit[record.id].of_turns
        )
        if not merged:
            untrained[record.id] = DropReason.NO_SAMPLED_TOKENS
        rows.extend(replace(row, score_version=score_version) for row in merged)
    reasons = {record.id: untrained[record.id].value for record in scored if record.id in untrained}
    advantages = {record_id: earned.mean for record_id, earned in credit.items()}
    decided = replace(undecided, advantages=advantages, untrained=reasons)
    if not rows:
        return replace(decided, drop_reason=_last_reason(untrained.values()).value), []
    return replace(decided, outcome=GroupOutcome.TRAINABLE), rows


def _episode_scores(records: Sequence[Record]) -> dict[str, tuple[float, ...]]:
    """Scores by episode, of the Records that are meta-episodes."""
    return {
        record.id: tuple(float(episode.score or 0.0) for episode in record.episodes)
        for record in records
        if record.episodes
    }


def _untrained(
    scored: Sequence[Record],
    credit: Mapping[str, Credit],
    num_turns: Mapping[str, int],
    *,
    task_id: str,
    algo: AlgoConfig,
    min_turns: int,
) -> dict[str, DropReason]:
    """Records that give no rows, each with the first reason that applies."""
    untrained = {
        record_id: reason
        for record_id, earned in credit.items()
        if (reason := _advantage_reason(earned, algo=algo)) is not None
    }
    short = short_successes(scored, num_turns, min_turns=min_turns)
    surplus: set[str] = set()
    if algo.reserve_context_error_count is not None:
        surplus = surplus_context_errors(scored, keep=algo.reserve_context_error_count, seed=task_id) - short
    unbalanced: set[str] = set()
    if algo.balance_sample:
        scores = {record.id: float(record.score or 0.0) for record in scored}
        unbalanced = surplus_of_balance(scores, excluded=short | surplus, seed=task_id)
    chosen = ((DropReason.MIN_TURNS, short), (DropReason.CONTEXT_ERROR, surplus), (DropReason.UNBALANCED, unbalanced))
    for reason, record_ids in chosen:
        for record_id in record_ids:
            untrained.setdefault(record_id, reason)
    return untrained


def _advantage_reason(credit: Credit, *, algo: AlgoConfig) -> DropReason | None:
    if algo.is_whitened_per_step:
        return None  # a return of 0 may be far from the step's mean
    if algo.drop_zero_advantage and credit.is_zero:
        return DropReason.ZERO_ADVANTAGE
    if algo.minimal_advantage is not None and credit.mean < algo.minimal_advantage:
        return DropReason.MINIMAL_ADVANTAGE
    if algo.skip_non_positive_advantage and credit.mean <= 0.0:
        return DropReason.NON_POSITIVE_ADVANTAGE
    return None


def _last_reason(reasons: Iterable[DropReason]) -> DropReason:
    order = list(DropReason)
    return max(reasons, key=order.index)


def is_scored(record: Record) -> bool:
    """Whether the policy ended this Record and a scorer gave it a number: what a baseline may contain."""
    is_infrastructure = record.stop_reason is not None and record.stop_reason.is_infrastructure
    return record.status is RecordStatus.FINISHED and not is_infrastructure and is_score(record.score)


def has_fitting_turn_scores(record: Record, turns: Sequence[Turn]) -> bool:
    """Whether a Record has no `turn_scores`, or one for each turn, each empty or a score."""
    scores = record.turn_scores
    return not scores or (len(scores) == len(turns) and all(score is None or is_score(score) for score in scores))


def _smallest_group(algo: AlgoConfig) -> int:
    return 2 if algo.needs_group else 1
