"""The decision on a complete group: who enters the baseline, who is trained, and if not, why.

    Records ─ without a score ──────────────► num_failed (never a reward of 0)
       │
       └─ scored ─► rewards ─► advantages ─► rows of the Records that carry signal
                       │            ├─ all zero ─────────────► dropped: zero_advantage
                       │            └─ no Record with rows ──► dropped: min_turns or no_sampled_tokens
                       └─ fewer than a baseline needs ───────► dropped: too_few_scored

Pure, so whoever settles a group, and however often, decides the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum

from agentrl.algo.advantages import CORRECT_SCORE, group_advantages
from agentrl.algo.merge import merge_record
from agentrl.config.sections import AlgoConfig
from agentrl.types import DBRecordData, GroupOutcome, GroupSettlement, Record, RecordStatus, Task, Turn

TRAIN_SPLIT_PREFIX = "train"


class DropReason(StrEnum):
    """Why a training group gives no rows. Closed."""

    TOO_FEW_SCORED = "too_few_scored"
    ZERO_ADVANTAGE = "zero_advantage"
    MIN_TURNS = "min_turns"
    NO_SAMPLED_TOKENS = "no_sampled_tokens"


def settle_group(
    task: Task,
    records: Sequence[Record],
    turns: Mapping[str, Sequence[Turn]],
    *,
    algo: AlgoConfig,
    min_turns: int,
) -> tuple[GroupSettlement, list[DBRecordData]]:
    """Advantages of a group and its training rows.

    Records that the system ended, that failed or that have no finite score leave the baseline and count in
    `num_failed`, as do Records that are missing from the group. Splits that do not start with "train" are EVALUATED:
    rewards only. A correct Record with fewer than `min_turns` turns stays in the baseline and gives no rows. Zero
    advantages give no rows while `drop_zero_advantage` is on.

    Advantages are stored unscaled: the loss applies `adv_scaling`.
    """
    scored = [record for record in records if is_scored(record)]
    rewards = {record.id: float(record.score or 0.0) for record in scored}
    num_failed = max(task.num_generations, len(records)) - len(scored)

    def settlement(
        outcome: GroupOutcome, *, advantages: Mapping[str, float], reason: DropReason | None = None
    ) -> GroupSettlement:
        return GroupSettlement(
            task_id=task.id,
            outcome=outcome,
            drop_reason=None if reason is None else reason.value,
            rewards=rewards,
            advantages=advantages,
            num_failed=num_failed,
        )

    if not task.split.startswith(TRAIN_SPLIT_PREFIX):
        return settlement(GroupOutcome.EVALUATED, advantages={}), []
    if len(scored) < _smallest_group(algo):
        return settlement(GroupOutcome.DROPPED, advantages={}, reason=DropReason.TOO_FEW_SCORED), []
    advantages = _advantages(rewards, algo=algo)
    trained = [record for record in scored if advantages[record.id] != 0.0 or not algo.drop_zero_advantage]
    if not trained:
        return settlement(GroupOutcome.DROPPED, advantages=advantages, reason=DropReason.ZERO_ADVANTAGE), []
    trained = [record for record in trained if not is_short_success(record, turns[record.id], min_turns=min_turns)]
    rows = [
        row
        for record in trained
        for row in merge_record(record, turns[record.id], reward=rewards[record.id], advantage=advantages[record.id])
    ]
    if not rows:
        reason = DropReason.NO_SAMPLED_TOKENS if trained else DropReason.MIN_TURNS
        return settlement(GroupOutcome.DROPPED, advantages=advantages, reason=reason), []
    return settlement(GroupOutcome.TRAINABLE, advantages=advantages), rows


def is_scored(record: Record) -> bool:
    """Whether the policy ended this Record and a scorer gave it a number: what a baseline may contain."""
    is_infrastructure = record.stop_reason is not None and record.stop_reason.is_infrastructure
    has_score = record.score is not None and math.isfinite(record.score)
    return record.status is RecordStatus.FINISHED and not is_infrastructure and has_score


def is_short_success(record: Record, turns: Sequence[Turn], *, min_turns: int) -> bool:
    """Whether a Record is correct with fewer turns than asked for: right without doing the work."""
    return record.score is not None and record.score > CORRECT_SCORE and len(turns) < min_turns


def _smallest_group(algo: AlgoConfig) -> int:
    return 1 if algo.advantage == "none" else 2


def _advantages(rewards: Mapping[str, float], *, algo: AlgoConfig) -> dict[str, float]:
    if algo.advantage == "none":
        return dict.fromkeys(rewards, 1.0)
    values = group_advantages(list(rewards.values()), method=algo.advantage)
    return dict(zip(rewards, values, strict=True))
