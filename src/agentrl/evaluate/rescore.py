"""Scores the Records of a run again under another version of a scorer. Only adds: what was sampled stays as it was.

    every Record the policy ended, or whose judge failed
        │ has a Score of this version? ──yes──► done
        ▼ no
    score ──► put_score (the first one of a version stays)

So it can be killed anywhere and started again: what was scored is not scored twice, and the result is the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agentrl.algo.score_versions import can_be_scored
from agentrl.errors import ScoringError
from agentrl.protocols import Store
from agentrl.rollout.scoring import RecordScorer
from agentrl.scoring import FORMAT_SCORER, MCPScorerFactory, parse_expression
from agentrl.types import Record, RecordStatus, Task, ToolSpec, Turn

logger = logging.getLogger(__name__)

_CHUNK = 256

Progress = Callable[[int, int], None]
"""(Records looked at, Records there are), after each one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RescorePlan:
    """What is scored again, and how."""

    scorer: str | None = None  # None: every Task's own
    split: str | None = None
    only_judge_errors: bool = False
    max_in_flight: int = 16

    def covers(self, record: Record) -> bool:
        """Whether a Record has an outcome that can be scored: the policy ended it, or only its judge failed."""
        if self.split is not None and record.split != self.split:
            return False
        return can_be_scored(record) and not (self.only_judge_errors and record.status is RecordStatus.FINISHED)


@dataclass(slots=True, kw_only=True)
class RescoreReport:
    """What came of it. `versions`: how many Records have a score under each version now."""

    num_scored: int = 0
    num_known: int = 0
    num_failed: int = 0
    versions: dict[str, int] = field(default_factory=dict)
    last_error: str = ""


async def rescore(
    store: Store, *, plan: RescorePlan, scoring: RecordScorer, tools: Sequence[ToolSpec], progress: Progress
) -> RescoreReport:
    """Score every Record the plan covers. A Record that cannot be scored is counted and left for the next time.

    Raises ConfigError for a scorer that cannot be used.
    """
    rescoring = _Rescoring(
        store=store, plan=plan, scoring=scoring, tools=tools, slots=asyncio.Semaphore(plan.max_in_flight)
    )
    record_ids = await store.list_record_ids()
    for start in range(0, len(record_ids), _CHUNK):
        chunk = record_ids[start : start + _CHUNK]
        await rescoring.score_all([record for record in await store.find_records(chunk) if plan.covers(record)])
        progress(min(start + _CHUNK, len(record_ids)), len(record_ids))
    return rescoring.report


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rescoring:
    store: Store
    plan: RescorePlan
    scoring: RecordScorer
    tools: Sequence[ToolSpec]
    slots: asyncio.Semaphore
    report: RescoreReport = field(default_factory=RescoreReport)

    async def score_all(self, records: Sequence[Record]) -> None:
        """Score those of the Records that have no score of their version yet."""
        task_ids = sorted({record.task_id for record in records})
        tasks = {state.task.id: state.task for state in await self.store.find_tasks(task_ids)}
        by_version: dict[str, list[Record]] = {}
        for record in records:
            if record.task_id in tasks:
                by_version.setdefault(self._version(tasks[record.task_id]), []).append(record)
        for version, group in by_version.items():
            known = await self.store.find_scores(group, version=version)
            self.report.num_known += len(known)
            self.report.versions[version] = self.report.versions.get(version, 0) + len(known)
            async with asyncio.TaskGroup() as running:
                for record in group:
                    if record.id not in known:
                        running.create_task(self._score(record, tasks[record.task_id], version=version))

    def _version(self, task: Task) -> str:
        return MCPScorerFactory.version(self.plan.scorer or task.scorer, judge=self.scoring.context.judge)

    async def _score(self, record: Record, task: Task, *, version: str) -> None:
        scorer = self.plan.scorer or task.scorer
        async with self.slots:
            turns = await self._turns(record, scorer=scorer)
            try:
                scored = await self.scoring.score_again(
                    task, scorer=scorer, record=record, turns=turns, tools=self.tools
                )
            except ScoringError as error:
                self.report.num_failed += 1
                self.report.last_error = f"{record.id}: {error}"
                logger.warning("%s cannot be scored: %s", record.id, error)
                return
            await self.store.put_score(scored.under(version, record=record, scorer=scorer))
        self.report.num_scored += 1
        self.report.versions[version] += 1

    async def _turns(self, record: Record, *, scorer: str) -> list[Turn]:
        """The turns, where the scorer looks at them."""
        return await self.store.load_turns(record) if FORMAT_SCORER in parse_expression(scorer).names else []
