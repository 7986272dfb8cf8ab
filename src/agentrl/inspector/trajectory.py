"""One Record as a person reads it: question, every turn with its tool calls and results, score, and what it trained."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from agentrl.errors import UnavailableError
from agentrl.inspector.plain import plain
from agentrl.inspector.records import score_text
from agentrl.protocols import ReadStore
from agentrl.types import (
    BRANCH,
    CONVERSATION,
    EPISODE,
    FINAL_ANSWER,
    DispatchedSamplingTask,
    EpisodeResult,
    GroupSettlement,
    Record,
    Task,
    ToolStatus,
    TrainStep,
    Turn,
)

ROLE_STYLES = {"system": "magenta", "user": "cyan", "assistant": "bold green", "tool": "yellow"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """A Record with all that is known about it."""

    record: Record
    task: Task
    turns: tuple[Turn, ...]
    settlement: GroupSettlement | None
    steps: tuple[TrainStep, ...]  # every step that consumed its group

    @property
    def trained_in(self) -> tuple[TrainStep, ...]:
        """The steps that trained a sequence of this very Record."""
        prefix = f"{self.record.id}/"
        return tuple(step for step in self.steps if any(s.startswith(prefix) for s in step.sequence_ids))


async def load_trajectory(store: ReadStore, *, record_id: str) -> Trajectory:
    """Read a Record and its surroundings. Raises UnavailableError if it is not there."""
    record = await store.get_record(record_id)
    if record is None:
        raise UnavailableError(f"record {record_id!r} is not in this run; `agentrl inspect RUN_NAME` lists the newest")
    task = await store.get_task(record.task_id)
    if task is None:
        raise UnavailableError(f"task {record.task_id!r} of record {record_id!r} is not in this run")
    return Trajectory(
        record=record,
        task=task,
        turns=tuple(await store.load_turns(record)),
        settlement=await store.get_settlement(record.task_id),
        steps=tuple(await store.steps_of_task(record.task_id)),
    )


def render_trajectory(trajectory: Trajectory) -> RenderableType:
    """The whole Record, top to bottom."""
    parts: list[RenderableType] = [_head(trajectory)]
    if trajectory.task.system_prompt:
        parts.append(_message("system", trajectory.task.system_prompt))
    parts.append(_message("user", trajectory.task.query))
    for turn in trajectory.turns:
        parts.extend(_turn(turn))
    parts.append(Rule(style="dim"))
    parts.append(_outcome(trajectory))
    return Group(*parts)


def _head(trajectory: Trajectory) -> RenderableType:
    record, task = trajectory.record, trajectory.task
    table = Table.grid(padding=(0, 2))
    table.add_row(Text("record", style="dim"), plain(record.id, style="bold"))
    table.add_row(Text("task", style="dim"), plain(f"{task.id}, scorer {task.scorer}, answer in {task.answer_schema}"))
    table.add_row(Text("expected", style="dim"), plain(str(task.answer)))
    tokens = f"{record.num_prompt_tokens} prompt + {record.num_completion_tokens} sampled tokens"
    table.add_row(
        Text("size", style="dim"),
        Text(f"{len(trajectory.turns)} turns, {record.num_tool_calls} tool calls, {tokens}"),
    )
    table.add_row(Text("policy", style="dim"), Text(_versions(trajectory.turns)))
    table.add_row(Text("sampled by", style="dim"), Text(record.worker or "-"))
    return table


def _turn(turn: Turn) -> Iterator[RenderableType]:
    model = turn.model
    seconds = (model.finished_at - model.started_at).total_seconds()
    notes = [f"turn {turn.index}", f"{seconds:.2f} s", model.target]
    if model.tokens is not None:
        tokens = model.tokens
        notes.insert(1, f"+{len(tokens.prompt_ids)} prompt, {len(tokens.completion_ids)} sampled")
        notes.insert(2, _versions((turn,)))
        if tokens.logprobs:
            notes.append(f"mean log-prob {math.fsum(tokens.logprobs) / len(tokens.logprobs):.3f}")
    if BRANCH in model.request:
        notes.append(_branch(model.request[BRANCH]))
    if EPISODE in model.request:
        notes.append("episode {number} begins: the one before ended with {after}".format(**model.request[EPISODE]))
    if FINAL_ANSWER in model.request:
        notes.append(f"final answer, because of {model.request[FINAL_ANSWER]}")
    yield Rule(style="dim")
    yield plain(" · ".join(notes), style="dim")
    yield _message("assistant", _response_text(model))
    for call in turn.tools:
        yield _tool_call(call)


def _branch(branch: Mapping[str, str]) -> str:
    if branch["strategy"] == CONVERSATION:
        return f"said by {branch['because']}"
    return f"new context: {branch['strategy']}, because of {branch['because']}"


def _tool_call(call: DispatchedSamplingTask) -> RenderableType:
    arguments = json.dumps(call.request.get("arguments", {}), ensure_ascii=False)
    seconds = (call.finished_at - call.started_at).total_seconds()
    is_ok = call.status == ToolStatus.OK.value
    head = Text.assemble(
        ("call ", "dim"), plain(f"{call.request.get('name', call.target)}({arguments})", style="yellow"),
        ("  " + call.status, "green" if is_ok else "bold red"), (f"  {seconds:.2f} s", "dim"),
    )  # fmt: skip
    content = str(call.response.get("content", "")) or (call.error or "")
    return Group(Padding(head, (0, 0, 0, 2)), _message("tool", content))


def _outcome(trajectory: Trajectory) -> RenderableType:
    record, settlement = trajectory.record, trajectory.settlement
    table = Table.grid(padding=(0, 2))
    stop = record.stop_reason.value if record.stop_reason else record.status.value
    table.add_row(Text("stopped", style="dim"), plain(stop + (f": {record.error}" if record.error else "")))
    table.add_row(Text("answer", style="dim"), plain(record.answer if record.answer is not None else "-"))
    table.add_row(Text("score", style="dim"), score_text(record.score))
    for number, episode in enumerate(record.episodes):
        table.add_row(Text(f"episode {number}", style="dim"), plain(_episode(episode)))
    if settlement is not None:
        table.add_row(Text("reward", style="dim"), Text(_number(settlement.rewards, record.id)))
        table.add_row(Text("advantage", style="dim"), Text(_number(settlement.advantages, record.id)))
        reason = f" ({settlement.drop_reason})" if settlement.drop_reason else ""
        table.add_row(Text("group", style="dim"), Text(settlement.outcome.value + reason))
    table.add_row(Text("trained in", style="dim"), Text(_trained(trajectory)))
    return table


def _episode(episode: EpisodeResult) -> str:
    score = "not scored" if episode.score is None else f"score {episode.score:.3f}"
    answer = "no answer" if episode.answer is None else f"answer {episode.answer}"
    size = f"{episode.num_turns} turns, {episode.num_tool_calls} tool calls, {episode.num_completion_tokens} tokens"
    return f"{answer}, {score}, stopped: {episode.stop_reason.value}, {size}"


def _trained(trajectory: Trajectory) -> str:
    if steps := trajectory.trained_in:
        return ", ".join(f"step {step.step} (on policy v{step.policy_version})" for step in steps)
    if trajectory.steps:
        return ", ".join(
            f"not trained: step {step.step} consumed its group"
            + (f" ({step.dropped[trajectory.task.id]})" if trajectory.task.id in step.dropped else "")
            for step in trajectory.steps
        )
    return "no step yet"


def _message(role: str, content: str) -> RenderableType:
    label = Text(f"{role:<10}", style=ROLE_STYLES[role])
    table = Table.grid(padding=(0, 1))
    table.add_column(width=10)
    table.add_row(label, plain(content.strip("\n")))
    return table


def _response_text(model: DispatchedSamplingTask) -> str:
    text: Any = model.response.get("text", "")
    return str(text)


def _versions(turns: tuple[Turn, ...]) -> str:
    versions = sorted({span.version for turn in turns if turn.model.tokens for span in turn.model.tokens.version_spans})
    return ", ".join(f"v{version}" for version in versions) or "-"


def _number(values: Mapping[str, float], record_id: str) -> str:
    return f"{values[record_id]:+.3f}" if record_id in values else "- (failed Records enter no baseline)"
