"""Evaluation: the training rollout loop on held-out Tasks, with its own bookkeeping.

Every evaluation is a split of its own (`eval-v<policy version>...`, with a fingerprint of tasks and settings) in the
run's database: claimed, resumed and inspected like training, and its denominator is all Tasks, failures included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from agentrl.evaluate.scaling import standard_error
from agentrl.evaluate.split import reflecting_always, sample_split, split_name
from agentrl.rollout.dataset import TaskRow
from agentrl.rollout.parts import RunParts
from agentrl.types import Record, RecordStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """What one policy version achieves on one task file. A failed Record counts in `num_records`, not in `score`."""

    split: str
    policy_version: int
    num_tasks: int
    num_records: int
    num_failed: int
    score: float  # mean over all scored Records
    standard_error: float
    mean_tool_calls: float
    mean_completion_tokens: float
    stop_reasons: Mapping[str, int]
    score_by_kind: Mapping[str, float]  # by the rows' metadata["kind"], where given


async def evaluate(
    parts: RunParts, *, rows: Sequence[TaskRow], policy_version: int, num_generations: int = 1, variant: str = ""
) -> EvaluationReport:
    """Roll out every row under the weights the parts' client serves and report. Finished Records are not repeated.

    Whether an answer is right decides nothing here: a run that reflects on wrong answers reflects on all of them.
    `variant` is part of the split's name, for its readers: Records made under other settings do not count in any case.
    """
    parts = replace(parts, config=reflecting_always(parts.config))
    split = split_name(parts, rows=rows, policy_version=policy_version, variant=variant)
    tasks, records = await sample_split(parts, rows=rows, split=split, num_generations=num_generations)
    kinds = {task.id: str(task.metadata["kind"]) for task in tasks if "kind" in task.metadata}
    return summarise(records, split=split, policy_version=policy_version, num_tasks=len(tasks), kinds=kinds)


def summarise(
    records: Sequence[Record], *, split: str, policy_version: int, num_tasks: int, kinds: Mapping[str, str]
) -> EvaluationReport:
    """The numbers of an evaluation from its final Records."""
    scored = [record for record in records if record.score is not None]
    scores = [record.score for record in scored if record.score is not None]
    mean = sum(scores) / len(scores) if scores else math.nan
    of_task: dict[str, list[float]] = {}
    by_kind: dict[str, list[float]] = {}
    for record in scored:
        of_task.setdefault(record.task_id, []).append(record.score or 0.0)
        if record.task_id in kinds and record.score is not None:
            by_kind.setdefault(kinds[record.task_id], []).append(record.score)
    reasons = [record.stop_reason.value for record in records if record.stop_reason is not None]
    return EvaluationReport(
        split=split,
        policy_version=policy_version,
        num_tasks=num_tasks,
        num_records=len(records),
        num_failed=sum(record.status is RecordStatus.FAILED for record in records),
        score=mean,
        standard_error=standard_error(list(of_task.values())) if scores else math.nan,
        mean_tool_calls=_mean([record.num_tool_calls for record in scored]),
        mean_completion_tokens=_mean([record.num_completion_tokens for record in scored]),
        stop_reasons={reason: reasons.count(reason) for reason in sorted(set(reasons))},
        score_by_kind={kind: _mean(values) for kind, values in sorted(by_kind.items())},
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
