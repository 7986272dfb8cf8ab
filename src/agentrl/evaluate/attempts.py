"""The attempts a stored Record made at its question, graded, as test-time scaling counts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from agentrl.errors import ConfigError, ScoringError
from agentrl.evaluate.scaling import Attempt
from agentrl.protocols import AuditStore
from agentrl.rollout.dataset import TaskRow
from agentrl.scoring.gaia import sub_exact_match
from agentrl.scoring.ground_truth import accepted_answers
from agentrl.scoring.scorers import exact_match, token_f1
from agentrl.types import DispatchedSamplingTask, DispatchKind, EpisodeResult, Record, StopReason, Task, ToolStatus

_CHUNK = 64

Calls = Mapping[str, Sequence[DispatchedSamplingTask]]
"""The calls of each turn, by turn id."""


def check_truths(rows: Sequence[TaskRow]) -> None:
    """Raise ConfigError if a row's answer is nothing that em, f1 and sub-EM can be compared with."""
    for row in rows:
        try:
            accepted_answers({"answer": row.answer})
        except ScoringError as error:
            raise ConfigError(
                f"task {row.item_id}: {error}; em, f1 and sub-EM per turn need answers in text: leave this task out of "
                "eval_file, or evaluate without --reflection_turns and --parallel"
            ) from error


async def read_attempts(
    store: AuditStore, *, tasks: Sequence[Task], records: Sequence[Record], by_episode: bool
) -> dict[str, list[list[Attempt]]]:
    """The attempts of every scored Record, by Task id and in the order of generations. Others are left out.

    Without `by_episode` a Record is one attempt, whatever its sampler made of it.
    """
    of_task: dict[str, list[list[Attempt]]] = {task.id: [] for task in tasks}
    by_id = {task.id: task for task in tasks}
    scored = sorted((record for record in records if record.score is not None), key=lambda record: record.generation)
    for start in range(0, len(scored), _CHUNK):
        chunk = scored[start : start + _CHUNK]
        calls = await store.find_dispatches([turn_id for record in chunk for turn_id in record.turn_ids])
        for record in chunk:
            attempts = await record_attempts(record, task=by_id[record.task_id], calls=calls, by_episode=by_episode)
            of_task[record.task_id].append(attempts)
    return of_task


async def record_attempts(record: Record, *, task: Task, calls: Calls, by_episode: bool) -> list[Attempt]:
    """One attempt per episode of a scored Record, or all of it as one; a Record without episodes is one attempt."""
    episodes = (record.episodes if by_episode else ()) or (_as_episode(record),)
    ends = accumulate(episode.num_turns for episode in episodes)
    return [
        await _attempt(episode, task=task, turn_ids=record.turn_ids[end - episode.num_turns : end], calls=calls)
        for episode, end in zip(episodes, ends, strict=True)
    ]


def _as_episode(record: Record) -> EpisodeResult:
    return EpisodeResult(
        answer=record.answer,
        score=record.score,
        stop_reason=record.stop_reason or StopReason.ANSWER,
        num_turns=len(record.turn_ids),
        num_tool_calls=record.num_tool_calls,
        num_completion_tokens=record.num_completion_tokens,
    )


async def _attempt(episode: EpisodeResult, *, task: Task, turn_ids: Sequence[str], calls: Calls) -> Attempt:
    answered_at = turn_ids[-1] if episode.answer is not None else None
    truth = {"query": task.query, "answer": task.answer}
    answer = episode.answer
    return Attempt(
        answer=answer,
        score=episode.score or 0.0,
        em=0.0 if answer is None else await exact_match(answer, truth, {}),
        f1=0.0 if answer is None else await token_f1(answer, truth, {}),
        sub_em=0.0 if answer is None else await sub_exact_match(answer, truth, {}),
        num_tool_calls=sum(_counts(call) for turn_id in turn_ids for call in calls[turn_id]),
        num_model_calls=episode.num_turns,
        num_invalid_actions=sum(turn_id != answered_at and not _asks_a_tool(calls[turn_id]) for turn_id in turn_ids),
    )


def _counts(call: DispatchedSamplingTask) -> bool:
    """Whether a call is one of those an episode may make: what it asks for beyond them costs nothing."""
    return call.kind is DispatchKind.TOOL and ToolStatus(call.status) is not ToolStatus.OVER_LIMIT


def _asks_a_tool(calls: Sequence[DispatchedSamplingTask]) -> bool:
    return any(call.kind is DispatchKind.TOOL and ToolStatus(call.status).was_sent for call in calls)
