"""The scores a group is settled with, where `score_version` asks for others than the Records' own.

    Records of the group ─ has a Score of the version? ──yes──────────────────────┐
                                 │ no                                             ├─► settle with these Scores
                                 └─► score, put_score ──judge away: wait, again───┘
                                          └─ no number to be had: the Record leaves the baseline

A Score that `agentrl rescore` wrote before is used; whatever is missing is scored now. Both write the same facts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.algo.score_versions import can_be_scored, is_wanted, scorer_of, with_scores
from agentrl.config import RunConfig
from agentrl.errors import ConfigError, ScoringError
from agentrl.protocols import ScoreStore
from agentrl.rollout.patience import Patience
from agentrl.rollout.scoring import RecordScorer
from agentrl.rollout.spending import first_refusal
from agentrl.scoring import MCPScorerFactory
from agentrl.types import Record, Task, ToolSpec, Turn

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupScores:
    """Scores groups under one version; shared by all groups of a process."""

    scorer: str
    version: str
    scoring: RecordScorer
    store: ScoreStore
    patience_s: float

    @classmethod
    def from_config(cls, config: RunConfig, *, scoring: RecordScorer, store: ScoreStore) -> GroupScores | None:
        """None where groups are settled with the Records' own scores.

        Raises ConfigError for a scorer that cannot be used here, or whose version is not the one that is asked for.
        """
        wanted = config.algo.score_version
        if wanted is None:
            return None
        version = MCPScorerFactory.version(scorer_of(wanted), judge=scoring.context.judge)
        if not is_wanted(version, wanted=wanted):
            raise ConfigError(
                f"score_version = {wanted!r}: its rules, prompts and judges are not those of this configuration, which "
                f"makes {version!r}; restore them, or set score_version = {scorer_of(wanted)!r}"
            )
        return cls(
            scorer=scorer_of(wanted), version=version, scoring=scoring, store=store,
            patience_s=config.rollout.judge_patience_s,
        )  # fmt: skip

    async def of_group(
        self, task: Task, finished: Sequence[tuple[Record, Sequence[Turn]]], *, tools: Sequence[ToolSpec]
    ) -> list[Record]:
        """The Records as the version sees them. Raises BudgetSpentError."""
        records = [record for record, _ in finished]
        known = await self.store.find_scores(records, version=self.version)
        try:
            async with asyncio.TaskGroup() as group:
                for record, turns in finished:
                    if record.id not in known and can_be_scored(record):
                        group.create_task(self._score(task, record, turns, tools=tools))
        except BaseExceptionGroup as errors:
            raise first_refusal(errors) or errors from errors
        scores = await self.store.find_scores(records, version=self.version)
        return with_scores(records, scores, version=self.version)

    async def _score(self, task: Task, record: Record, turns: Sequence[Turn], *, tools: Sequence[ToolSpec]) -> None:
        """Put the Record's score; nothing if no number can be had."""
        patience = Patience(limit_s=self.patience_s)
        while True:
            try:
                scored = await self.scoring.score_again(
                    task, scorer=self.scorer, record=record, turns=turns, tools=tools
                )
            except ScoringError as error:
                logger.warning("%s has no score of %s: %s", record.id, self.version, error)
                if error.retryable and await patience.wait():
                    continue
                return
            await self.store.put_score(scored.under(self.version, record=record, scorer=self.scorer))
            return
