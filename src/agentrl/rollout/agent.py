"""The rollout loop: one Record, from question to answer.

        question
           │ render to token ids (once)
           ▼
    ┌─► engine: context ids in, new ids out ──► parse the text
    │                                             │
    │                          answer? ──yes──► commit turn ──► stop(answer)
    │                             │ no
    │                    call the tools, concurrently
    │                             │
    │                        commit turn ──► limit reached? ──yes──► stop(reason)
    │                                             │ no
    └── render only the new messages ◄────────────┘

Token-exact (T1): the context is the list of ids the engine saw and produced; only new messages are rendered, and
nothing is ever decoded and encoded again. What happens next is a function of the committed turns alone, so another
process can take a half-finished Record over at any commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from uuid import uuid4

from agentrl.algo.suspects import FINISHED, STARTED
from agentrl.chat import ChatFormat, ParsedCompletion
from agentrl.config import InferenceConfig, RolloutConfig
from agentrl.protocols import GenerationClient, Toolbox, ToolJournal
from agentrl.rollout.deadlines import deadline, stopped_clock, time_left_s
from agentrl.rollout.limits import Limits, decide_stop, read_turn
from agentrl.rollout.recovery import journalled_call
from agentrl.rollout.scoring import RecordScorer
from agentrl.rollout.spending import first_refusal
from agentrl.rollout.tool_calls import LiveCaller, PendingCall, ToolCaller
from agentrl.scoring import extract_answer
from agentrl.types import (
    DispatchedSamplingTask,
    DispatchKind,
    GenerateReply,
    GenerateRequest,
    Record,
    ResultOrigin,
    SamplingParams,
    StopReason,
    Task,
    ToolRequest,
    ToolResult,
    ToolSpec,
    ToolStatus,
    Turn,
    TurnTokens,
)

AFTER_TOOLS_S = 1.5  # for cancelling calls that are too late, before the turn's own deadline

Commit = Callable[[Record, Turn], Awaitable[Record]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """Everything a rollout works with; shared by all rollouts of a process."""

    chat: ChatFormat
    client: GenerationClient
    toolbox: Toolbox
    journal: ToolJournal  # of the calls that must not be made twice
    commit_turn: Commit  # makes a turn durable and returns the new header
    rollout: RolloutConfig
    inference: InferenceConfig
    tool_timeout_s: float
    clock: Callable[[], datetime]
    scoring: RecordScorer = field(default_factory=RecordScorer)
    caller: ToolCaller | None = None  # how tool calls are made; None: live, without prices

    @property
    def sampling_params(self) -> SamplingParams:
        """Sampling parameters of every model call, from the configuration."""
        preferred = self.inference.preferred_sampling_params
        return SamplingParams(
            max_new_tokens=self.rollout.max_new_tokens,
            temperature=float(preferred.get("temperature", 1.0)),
            top_p=float(preferred.get("top_p", 1.0)),
            top_k=int(preferred.get("top_k", -1)),
            min_p=float(preferred.get("min_p", 0.0)),
            presence_penalty=self.inference.presence_penalty,
            frequency_penalty=self.inference.frequency_penalty,
            stop_token_ids=self.chat.stop_token_ids,
        )

    @property
    def tool_caller(self) -> ToolCaller:
        """How tool calls are made."""
        return self.caller or LiveCaller(journal=self.journal)

    def visible_tools(self, task: Task) -> tuple[ToolSpec, ...]:
        """The tools this Task's prompt names."""
        tools = self.toolbox.list_tools()
        return tuple(tool for tool in tools if task.tools is None or tool.name in task.tools)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """A finished trajectory: its header without a score, and its turns."""

    record: Record
    turns: tuple[Turn, ...]
    stop_reason: StopReason
    answer: str | None


async def run_rollout(task: Task, *, record: Record, committed: Sequence[Turn], agent: Agent) -> RolloutResult:
    """Sample one Record until it stops, continuing after the turns that are committed already.

    Raises EngineError when no engine can answer, StaleClaimError when another worker owns the Task now.
    """
    limits = Limits.from_config(agent.rollout, context_length=agent.inference.context_length)
    turns = list(committed)
    readings = [read_turn(turn, schema=task.answer_schema, chat=agent.chat) for turn in turns]
    context_ids = [token for turn in turns for token in (*turn.tokens.prompt_ids, *turn.tokens.completion_ids)]
    while (stop := decide_stop(readings, limits=limits)) is None:
        prompt_ids = _next_prompt(task, turns, limits=limits, agent=agent)
        if len(context_ids) + len(prompt_ids) > limits.max_context_tokens:
            stop = StopReason.CONTEXT_LIMIT
            break
        async with deadline(agent.rollout.turn_timeout_s):
            turn = await _take_turn(
                task, record=record, index=len(turns), context_ids=context_ids, prompt_ids=prompt_ids, agent=agent
            )
        with stopped_clock():
            record = await agent.commit_turn(record, turn)
        turns.append(turn)
        readings.append(read_turn(turn, schema=task.answer_schema, chat=agent.chat))
        context_ids += [*prompt_ids, *turn.tokens.completion_ids]
    answer = readings[-1].answer if stop is StopReason.ANSWER else None
    return RolloutResult(record=record, turns=tuple(turns), stop_reason=stop, answer=answer)


def initial_messages(task: Task, *, rollout: RolloutConfig) -> list[dict[str, str]]:
    """System and user message of a Task."""
    system = task.system_prompt if task.system_prompt is not None else rollout.system_prompt
    query = task.query_prompt.replace("{query}", task.query) if task.query_prompt else task.query
    head = [{"role": "system", "content": system}] if system else []
    return [*head, {"role": "user", "content": query}]


def _next_prompt(task: Task, turns: Sequence[Turn], *, limits: Limits, agent: Agent) -> tuple[int, ...]:
    """The ids to append to the context before the next model call."""
    tools = agent.visible_tools(task)
    if not turns:
        return agent.chat.render_prompt(initial_messages(task, rollout=agent.rollout), tools=tools)
    last = turns[-1]
    messages: list[Mapping[str, str]] = [
        {
            "role": "tool",
            "tool_call_id": str(call.request["call_id"]),
            "name": str(call.request["name"]),
            "content": str(call.response["content"]),
        }
        for call in last.tools
    ]
    if len(turns) >= limits.max_turns:
        messages.append({"role": "user", "content": agent.rollout.final_answer_prompt})
    elif not messages:
        messages.append({"role": "user", "content": agent.rollout.nudge_prompt})
    return agent.chat.render_continuation(messages, completion_ids=last.tokens.completion_ids, tools=tools)


async def _take_turn(
    task: Task,
    *,
    record: Record,
    index: int,
    context_ids: Sequence[int],
    prompt_ids: tuple[int, ...],
    agent: Agent,
) -> Turn:
    model = await ask_model(record, index=index, context_ids=context_ids, prompt_ids=prompt_ids, agent=agent)
    parsed = agent.chat.parse(str(model.response["text"]), tools=agent.visible_tools(task))
    if extract_answer(parsed.content, schema=task.answer_schema) is not None:
        return Turn(model=model)  # an answer ends the Record: calls beside it are not run
    return Turn(model=model, tools=await _call_tools(parsed, task=task, model=model, agent=agent))


async def ask_model(
    record: Record, *, index: int, context_ids: Sequence[int], prompt_ids: tuple[int, ...], agent: Agent
) -> DispatchedSamplingTask:
    """One completion behind the context and the prompt, as the Record's model call number `index`.

    Raises EngineError when no engine can answer.
    """
    params = agent.sampling_params
    started_at = agent.clock()
    reply = await agent.client.generate(
        GenerateRequest(
            rid=uuid4().hex,
            input_ids=[*context_ids, *prompt_ids],
            params=params,
            deadline_s=agent.inference.request_timeout_s,
            session=record.task_id,  # a group's requests share a service, so that they share its prefix cache
        )
    )
    text = agent.chat.completion_text(reply.output_ids)
    return _model_dispatch(
        record, turn=index, prompt_ids=prompt_ids, reply=reply, text=text, params=params, started_at=started_at,
        finished_at=agent.clock(),
    )  # fmt: skip


def _model_dispatch(
    record: Record,
    *,
    turn: int,
    prompt_ids: tuple[int, ...],
    reply: GenerateReply,
    text: str,
    params: SamplingParams,
    started_at: datetime,
    finished_at: datetime,
) -> DispatchedSamplingTask:
    again = f".{record.attempt}" if record.attempt > 1 else ""
    return DispatchedSamplingTask(
        id=f"{record.id}/{turn:03d}.{record.fence}{again}",
        record_id=record.id,
        task_id=record.task_id,
        turn=turn,
        index=0,
        kind=DispatchKind.MODEL,
        target=reply.service_id,
        status="ok",
        request={"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k, "min_p": params.min_p,
                 "max_new_tokens": params.max_new_tokens},
        response={"text": text, "num_cached_tokens": reply.num_cached_tokens, **_engine_times(reply)},
        started_at=started_at,
        finished_at=finished_at,
        tokens=TurnTokens(
            parent_turn=turn - 1,
            prompt_ids=prompt_ids,
            completion_ids=reply.output_ids,
            logprobs=reply.logprobs,
            version_spans=reply.version_spans,
            finish_reason=reply.finish_reason,
        ),
        cost_nano_usd=reply.cost_nano_usd,
    )  # fmt: skip


def _engine_times(reply: GenerateReply) -> dict[str, float]:
    if reply.engine_times is None:
        return {}
    started_s, finished_s = reply.engine_times
    return {STARTED: started_s, FINISHED: finished_s}


async def _call_tools(
    parsed: ParsedCompletion, *, task: Task, model: DispatchedSamplingTask, agent: Agent
) -> tuple[DispatchedSamplingTask, ...]:
    """Run the calls of one turn concurrently; results keep the order of the calls. Raises BudgetSpentError."""
    visible = {tool.name: tool for tool in agent.visible_tools(task)}
    try:
        async with asyncio.TaskGroup() as group:
            running = [
                group.create_task(_call_tool(call, index=index, visible=visible, model=model, agent=agent))
                for index, call in enumerate(parsed.tool_calls, start=1)
            ]
    except BaseExceptionGroup as errors:
        raise first_refusal(errors) or errors from errors
    return tuple(call.result() for call in running)


async def _call_tool(
    call: ToolRequest, *, index: int, visible: Mapping[str, ToolSpec], model: DispatchedSamplingTask, agent: Agent
) -> DispatchedSamplingTask:
    started_at = agent.clock()
    if call.error is not None:
        result = ToolResult(status=ToolStatus.MALFORMED, content=call.error, error=call.error)
    elif call.name not in visible:
        known = ", ".join(sorted(visible)) or "none"
        message = f"unknown tool {call.name!r}; available: {known}"
        result = ToolResult(status=ToolStatus.UNKNOWN_TOOL, content=message, error=message)
    else:
        result = await _send(call, spec=visible[call.name], index=index, model=model, agent=agent)
    return replace(
        model,
        id=f"{model.id}/{index}",
        index=index,
        kind=DispatchKind.TOOL,
        target=call.name,
        status=result.status.value,
        request={"name": call.name, "arguments": dict(call.arguments), "call_id": call.call_id},
        response={"content": result.content, **_origin(result)},
        started_at=started_at,
        finished_at=agent.clock(),
        tokens=None,
        error=result.error,
        cost_nano_usd=result.cost_nano_usd,
    )


def _origin(result: ToolResult) -> dict[str, str]:
    return {} if result.origin is ResultOrigin.LIVE else {"origin": result.origin.value}


async def _send(
    call: ToolRequest, *, spec: ToolSpec, index: int, model: DispatchedSamplingTask, agent: Agent
) -> ToolResult:
    # Deadlines nest: a call ends with a typed result before its turn or its Record would be cut off around it.
    limit_s = min(spec.timeout_s or agent.tool_timeout_s, max(0.0, time_left_s() - AFTER_TOOLS_S))
    return await agent.tool_caller.send(
        PendingCall(
            request=call,
            call=journalled_call(call, spec=spec, record_id=model.record_id, turn=model.turn, index=index),
            spec=spec,
            toolbox=agent.toolbox,
            deadline_s=limit_s,
        )
    )
