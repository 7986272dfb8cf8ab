"""Scores a Record, now or years later: what a scorer may look at, and its judge calls as facts of the Record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from uuid import uuid4

from agentrl.protocols import ScoreStore
from agentrl.rollout.episodes import turns_of_episodes
from agentrl.scoring import JudgeCall, ScoreRequest, ScoringContext, score_request
from agentrl.types import DispatchedSamplingTask, DispatchKind, Record, Score, Task, ToolSpec, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A score, of a meta-episode with those of its episodes, and the judge calls that were made for it."""

    value: float
    call_ids: tuple[str, ...]
    episode_values: tuple[float, ...] = ()

    def under(self, version: str, *, record: Record, scorer: str) -> Score:
        """As a fact of the Record's present attempt."""
        return Score(
            record_id=record.id, attempt=record.attempt, version=version, scorer=scorer, value=self.value,
            episode_values=self.episode_values, call_ids=self.call_ids,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordScorer:
    """Scores the Records of a process. Without a `store`, by rules alone: judges keep their calls there."""

    context: ScoringContext = field(default_factory=ScoringContext)
    store: ScoreStore | None = None

    async def score(
        self,
        task: Task,
        *,
        scorer: str,
        record: Record,
        turns: Sequence[Turn],
        answer: str | None,
        tools: Sequence[ToolSpec],
    ) -> Scored:
        """What `scorer` says of the trajectory. Its judge calls are stored, also those of a judge that failed.

        Raises ScoringError when no number can be had, ConfigError for a scorer that cannot be used here.
        """
        request = ScoreRequest(
            answer=answer,
            ground_truth={"query": task.query, "answer": task.answer},
            calls=[call for turn in turns for call in turn.tools if call.kind is DispatchKind.TOOL],
            tools=[tool for tool in tools if task.tools is None or tool.name in task.tools],
        )
        calls: list[JudgeCall] = []
        try:
            value = await score_request(scorer, request, context=self.context, calls=calls)
        finally:
            dispatches = [judge_dispatch(call, record=record) for call in calls]
            if dispatches and self.store is not None:
                await self.store.put_calls(dispatches)
        return Scored(value=value, call_ids=tuple(dispatch.id for dispatch in dispatches))

    async def score_again(
        self, task: Task, *, scorer: str, record: Record, turns: Sequence[Turn], tools: Sequence[ToolSpec]
    ) -> Scored:
        """What `scorer` says of a finished Record: of its answer, or of each of its episodes and so of the last one.

        An episode that was not begun scores 0. `turns` are looked at by the scorers that compare calls. Raises as
        `score`, for any of the episodes.
        """
        if not record.episodes:
            return await self.score(
                task, scorer=scorer, record=record, turns=turns, answer=record.answer, tools=tools
            )  # fmt: skip
        values: list[float] = []
        call_ids: list[str] = []
        for episode, own_turns in turns_of_episodes(turns, record.episodes):
            if not episode.num_turns:
                values.append(0.0)
                continue
            scored = await self.score(
                task, scorer=scorer, record=record, turns=own_turns, answer=episode.answer, tools=tools
            )
            values.append(scored.value)
            call_ids += scored.call_ids
        return Scored(value=values[-1], call_ids=tuple(call_ids), episode_values=tuple(values))


def judge_dispatch(call: JudgeCall, *, record: Record) -> DispatchedSamplingTask:
    """A request to a judge as a fact of the Record. Belongs to no turn; `turn` is the last one it had seen."""
    return DispatchedSamplingTask(
        id=f"{record.id}/judge.{uuid4().hex}",
        record_id=record.id,
        task_id=record.task_id,
        turn=max(0, len(record.turn_ids) - 1),
        index=0,
        kind=DispatchKind.JUDGE,
        target=call.model,
        status=call.status,
        request=call.request,
        response=call.response,
        started_at=call.started_at,
        finished_at=call.finished_at,
        error=call.error,
        cost_nano_usd=call.cost_nano_usd,
    )
