"""Builders of valid domain values for tests: `from factories import make_task`. Small integers stand in for tokens."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import numpy as np

from agentrl.types import (
    DBRecordData,
    DispatchedSamplingTask,
    DispatchKind,
    GroupOutcome,
    GroupSettlement,
    Record,
    RecordStatus,
    StopReason,
    Task,
    ToolStatus,
    Turn,
    TurnTokens,
    VersionSpan,
)

EPOCH_START = datetime(2026, 1, 1, tzinfo=UTC)


def make_task(
    item_id: str = "q1",
    *,
    split: str = "train",
    epoch: int = 0,
    num_generations: int = 2,
    query: str = "What is 1 + 1?",
    answer: str = "2",
) -> Task:
    return Task(
        id=f"{split}:{epoch}:{item_id}",
        item_id=item_id,
        split=split,
        epoch=epoch,
        query=query,
        answer=answer,
        num_generations=num_generations,
    )


def make_record(
    task: Task | None = None,
    *,
    generation: int = 0,
    fence: int = 1,
    status: RecordStatus = RecordStatus.RUNNING,
    turn_ids: tuple[str, ...] = (),
    stop_reason: StopReason | None = None,
    score: float | None = None,
    answer: str | None = None,
) -> Record:
    task = task or make_task()
    return Record(
        id=f"{task.id}/g{generation}",
        task_id=task.id,
        split=task.split,
        generation=generation,
        fence=fence,
        status=status,
        turn_ids=turn_ids,
        stop_reason=stop_reason,
        score=score,
        answer=answer,
        scorer=task.scorer if score is not None else None,
        worker="worker-0",
    )


def make_turn(
    record: Record | None = None,
    *,
    prompt_ids: Sequence[int] = (1, 2, 3),
    completion_ids: Sequence[int] = (4, 5),
    logprobs: Sequence[float] | None = None,
    version: int = 0,
    parent_turn: int | None = None,
    index: int | None = None,
    tool_results: Sequence[str] = (),
    text: str = "<think>add</think>",
    finish_reason: str = "stop",
) -> Turn:
    """The next turn of `record`: index and parent follow from its committed turns unless given."""
    record = record or make_record()
    index = len(record.turn_ids) if index is None else index
    tokens = TurnTokens(
        parent_turn=index - 1 if parent_turn is None else parent_turn,
        prompt_ids=tuple(prompt_ids),
        completion_ids=tuple(completion_ids),
        logprobs=tuple(logprobs) if logprobs is not None else (-0.5,) * len(completion_ids),
        version_spans=(VersionSpan(version=version, start=0, end=len(completion_ids)),),
        finish_reason=finish_reason,
    )
    again = f".{record.attempt}" if record.attempt > 1 else ""
    model = DispatchedSamplingTask(
        id=f"{record.id}/{index}.{record.fence}{again}",
        record_id=record.id,
        task_id=record.task_id,
        turn=index,
        index=0,
        kind=DispatchKind.MODEL,
        target="service-0",
        status="ok",
        request={"temperature": 1.0, "max_new_tokens": 16},
        response={"text": text},
        started_at=EPOCH_START + timedelta(seconds=index),
        finished_at=EPOCH_START + timedelta(seconds=index, milliseconds=250),
        tokens=tokens,
    )
    tools = tuple(_make_tool_call(model, index=k, content=content) for k, content in enumerate(tool_results, start=1))
    return Turn(model=model, tools=tools)


def _make_tool_call(model: DispatchedSamplingTask, *, index: int, content: str) -> DispatchedSamplingTask:
    return DispatchedSamplingTask(
        id=f"{model.id}/{index}",
        record_id=model.record_id,
        task_id=model.task_id,
        turn=model.turn,
        index=index,
        kind=DispatchKind.TOOL,
        target="calculator.calculate",
        status=ToolStatus.OK,
        request={"name": "calculate", "arguments": {"expression": "1 + 1"}, "call_id": f"call-{index}"},
        response={"content": content},
        started_at=model.finished_at,
        finished_at=model.finished_at + timedelta(milliseconds=100),
    )


def make_sequence(
    record: Record | None = None,
    *,
    part: int = 0,
    prompt_ids: Sequence[int] = (1, 2, 3),
    completion_ids: Sequence[int] = (4, 5),
    advantage: float = 1.0,
    reward: float = 1.0,
    version: int = 0,
    logprob: float = -0.5,
) -> DBRecordData:
    """A training row: the prompt masked out, the completion trained with one advantage."""
    record = record or make_record()
    mask = np.array([False] * len(prompt_ids) + [True] * len(completion_ids), dtype=np.bool_)
    return DBRecordData(
        id=f"{record.id}/s{part}",
        task_id=record.task_id,
        record_id=record.id,
        split=record.split,
        token_ids=np.array([*prompt_ids, *completion_ids], dtype=np.int32),
        loss_mask=mask,
        advantages=np.where(mask, np.float32(advantage), np.float32(0)).astype(np.float32),
        behaviour_logprobs=np.where(mask, np.float32(logprob), np.float32(0)).astype(np.float32),
        policy_versions=np.where(mask, version, -1).astype(np.int32),
        reward=reward,
        turn_ids=record.turn_ids,
    )


def make_settlement(
    task: Task | None = None,
    *,
    rewards: Sequence[float] = (1.0, 0.0),
    outcome: GroupOutcome = GroupOutcome.TRAINABLE,
    drop_reason: str | None = None,
) -> GroupSettlement:
    """Rewards of generations 0.., advantages as reward minus mean."""
    task = task or make_task()
    ids = [f"{task.id}/g{generation}" for generation in range(len(rewards))]
    mean = sum(rewards) / len(rewards) if rewards else 0.0
    return GroupSettlement(
        task_id=task.id,
        outcome=outcome,
        drop_reason=drop_reason,
        rewards=dict(zip(ids, rewards, strict=True)),
        advantages={record_id: reward - mean for record_id, reward in zip(ids, rewards, strict=True)},
        num_failed=task.num_generations - len(rewards),
    )
