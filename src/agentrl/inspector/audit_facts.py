"""What an audit works on: the facts of one group, and what the ledger says about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from agentrl.algo.score_versions import with_scores
from agentrl.config import RunConfig
from agentrl.protocols import TaskState
from agentrl.types import (
    DBRecordData,
    DispatchedSamplingTask,
    Record,
    Score,
    StepStatus,
    TaskStatus,
    TrainStep,
    Turn,
)

_CLOCK_ERROR = timedelta(seconds=5)  # of a Score's time, and between a settlement's last look at Scores and its own

Calls = Mapping[str, Sequence[DispatchedSamplingTask]]
"""Turn id -> the stored calls of that turn, by index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """A Task, its Records, their calls and its training rows, as they are stored. Nothing of it is trusted."""

    state: TaskState
    records: tuple[Record, ...]  # those found under the expected ids, by generation
    calls: Calls
    rows: Mapping[str, DBRecordData]  # by id: those its settlement names and those the ledger trained
    scores: Mapping[str, Score] = field(default_factory=dict)  # by Record: of the version the settlement names

    @property
    def task_id(self) -> str:
        """Of the Task, and of the group."""
        return self.state.task.id

    @property
    def scored_records(self) -> Sequence[Record]:
        """The Records as their settlement had to see them: with their own scores, or those of the version it names."""
        settlement = self.state.settlement
        if settlement is None or settlement.score_version is None:
            return self.records
        scores = {
            record_id: score
            for record_id, score in self.scores.items()
            if record_id in settlement.scores or self._was_there(score)
        }
        return with_scores(self.records, scores, version=settlement.score_version)

    def _was_there(self, score: Score) -> bool:
        """Whether a Score is older than the settlement; one that was made later could not be used."""
        settled_at = self.state.settled_at
        return settled_at is not None and score.scored_at is not None and score.scored_at < settled_at - _CLOCK_ERROR

    @property
    def is_settled(self) -> bool:
        """Whether the decision on the group is made."""
        return self.state.status in {TaskStatus.SETTLED, TaskStatus.CONSUMED}

    def turns_of(self, record: Record) -> tuple[Turn, ...] | None:
        """The committed turns, or None where a call is missing or has no tokens."""
        turns = []
        for turn_id in record.turn_ids:
            calls = self.calls.get(turn_id, ())
            if not calls or calls[0].id != turn_id or calls[0].tokens is None:
                return None
            turns.append(Turn(model=calls[0], tools=tuple(calls[1:])))
        return tuple(turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerFacts:
    """The ledger, turned around: what it says about each group and row."""

    steps: Mapping[int, TrainStep]
    steps_of_task: Mapping[str, Sequence[int]]
    steps_of_row: Mapping[str, Sequence[int]]
    rows_of_task: Mapping[str, Sequence[str]]  # trained rows, by the Task their id names
    is_supervised: bool
    max_trained_count: int  # steps that may train a group
    retrained_interval: int  # steps from one training of a group to the next, at least

    @classmethod
    def from_steps(cls, steps: Sequence[TrainStep], *, config: RunConfig) -> LedgerFacts:
        """Index a ledger."""
        of_task: dict[str, list[int]] = {}
        of_row: dict[str, list[int]] = {}
        rows_of_task: dict[str, list[str]] = {}
        for step in steps:
            for task_id in step.task_ids:
                of_task.setdefault(task_id, []).append(step.step)
            for row_id in step.sequence_ids:
                of_row.setdefault(row_id, []).append(step.step)
        for row_id in of_row:
            rows_of_task.setdefault(task_of_row(row_id), []).append(row_id)
        return cls(
            steps={step.step: step for step in steps},
            steps_of_task=of_task,
            steps_of_row=of_row,
            rows_of_task=rows_of_task,
            is_supervised=config.is_supervised,
            max_trained_count=config.algo.max_trained_count,
            retrained_interval=config.algo.retrained_interval,
        )

    @property
    def committed(self) -> list[TrainStep]:
        """Committed steps, in order."""
        return [step for _, step in sorted(self.steps.items()) if step.status is StepStatus.COMMITTED]


@dataclass(slots=True)
class StepTotals:
    """Sums over the rows of one step, to compare with its ledger entry."""

    num_rows: int = 0
    num_tokens: int = 0
    num_trained_tokens: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0


@dataclass(slots=True)
class RunTally:
    """What one pass over the groups leaves behind for the checks on the run as a whole."""

    totals: dict[int, StepTotals] = field(default_factory=dict)
    seen_tasks_of_ledger: set[str] = field(default_factory=set)
    seen_rows_of_ledger: set[str] = field(default_factory=set)
    consumed_later: dict[str, int] = field(default_factory=dict)  # task id -> step that the first look did not know
    sampled_versions: dict[int, str] = field(default_factory=dict)  # version -> the first Record with a token of it

    def of_step(self, step: int) -> StepTotals:
        """The sums of one step so far."""
        return self.totals.setdefault(step, StepTotals())


def task_of_row(row_id: str) -> str:
    """The Task a row id "<task>/g<generation>/s<part>" names; empty for rows no rollout made."""
    parts = row_id.rsplit("/", 2)
    return parts[0] if len(parts) == 3 else ""
