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
from textwrap import shorten
from uuid import uuid4

from agentrl.algo.suspects import FINISHED, STARTED
from agentrl.chat import ChatFormat, ParsedCompletion
from agentrl.config import InferenceConfig, ReflectionConfig, RolloutConfig
from agentrl.errors import ConfigError
from agentrl.protocols import GenerationClient, Toolbox, ToolJournal
from agentrl.rollout.browse import BrowseCall, Browser, as_dispatches, summary_of
from agentrl.rollout.context import ContextPlanner, NextCall, SummaryWanted, branch_turns
from agentrl.rollout.deadlines import deadline, stopped_clock, time_left_s
from agentrl.rollout.episodes import EpisodePlanner
from agentrl.rollout.limits import Limits, TurnReading, read_turn
from agentrl.rollout.partial import LegLimits
from agentrl.rollout.recovery import journalled_call, sampling_seed, unresumable_tools
from agentrl.rollout.results import refused_address, show_result
from agentrl.rollout.scoring import RecordScorer
from agentrl.rollout.spending import first_refusal
from agentrl.rollout.tool_calls import LiveCaller, PendingCall, ToolCaller
from agentrl.scoring import extract_answer
from agentrl.types import (
    FINAL_ANSWER,
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

_MAX_NAME_CHARS = 80
_MAX_NAMES_CHARS = 1000  # of the tools there are

Commit = Callable[[Record, Turn], Awaitable[Record]]
Verify = Callable[[Sequence[Turn]], Awaitable[bool]]
"""Whether the answer that the last of these turns gives is right: a rule, so that it says the same after a takeover."""


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
    reflection: ReflectionConfig = field(default_factory=ReflectionConfig)
    tool_timeout_s: float
    clock: Callable[[], datetime]
    scoring: RecordScorer = field(default_factory=RecordScorer)
    caller: ToolCaller | None = None  # how tool calls are made; None: live, without prices
    browser: Browser | None = None  # summarises long results and contexts
    leg_limits: LegLimits | None = None  # None: Records are sampled to their end
    seed: int = 0  # of the run: with Record, attempt and turn it decides what a seeded engine draws

    def __post_init__(self) -> None:
        """Refuse, before work starts, a strategy that nobody here can carry out."""
        if self.rollout.new_context == "discard_all":
            _ = self.summariser

    @property
    def summariser(self) -> Browser:
        """Who writes the summaries of `new_context = discard_all`. Raises ConfigError if nobody does."""
        if self.browser is None:
            raise ConfigError(
                "new_context = discard_all: its summaries are written by the browse_agent of agent_config_path, and "
                "there is none; configure one or set new_context = last_k"
            )
        return self.browser

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

    def planner(self, task: Task) -> ContextPlanner:
        """Plans the model calls of a Record of this Task."""
        limits = Limits.from_config(
            self.rollout,
            context_length=self.inference.context_length,
            max_tool_calls=self.reflection.tool_calls_per_episode,
        )
        return ContextPlanner.build(
            task, tools=self.visible_tools(task), chat=self.chat, rollout=self.rollout, limits=limits,
            reflection_prompt=self.reflection.reflection_prompt,
        )  # fmt: skip

    def visible_tools(self, task: Task) -> tuple[ToolSpec, ...]:
        """The tools this Task's prompt names."""
        return tuple(tool for tool in self.toolbox.list_tools() if task.tools is None or tool.name in task.tools)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """A finished trajectory: its header without a score, and its turns."""

    record: Record
    turns: tuple[Turn, ...]
    stop_reason: StopReason | None  # None: put down, to be continued (partial.py)
    answer: str | None


async def run_rollout(
    task: Task,
    *,
    record: Record,
    committed: Sequence[Turn],
    agent: Agent,
    planner: ContextPlanner | EpisodePlanner | None = None,
    verify: Verify | None = None,
) -> RolloutResult:
    """Sample one Record until it stops, continuing after the turns that are committed already.

    `planner` None: the Record is one attempt. `verify`: the planner wants to know of each answer whether it is right.

    Raises EngineError when no engine can answer, StaleClaimError when another worker owns the Task now; what `verify`
    raises.
    """
    planner = planner or agent.planner(task)
    turns = list(committed)
    readings = [await _read(turns[: end + 1], task=task, agent=agent, verify=verify) for end in range(len(turns))]
    started_at = agent.clock()
    while not isinstance(plan := planner.next_call(turns, readings=readings), StopReason):
        if _is_put_down(turns, num_before=len(committed), started_at=started_at, agent=agent):
            return RolloutResult(record=record, turns=tuple(turns), stop_reason=None, answer=None)
        async with deadline(agent.rollout.turn_timeout_s):
            call, summaries = await _with_summary(plan, planner=planner, turns=turns, agent=agent)
            if isinstance(call, StopReason):
                plan = call
                break
            calls_left = planner.calls_left(turns, call=call)
            turn = await take_turn(task, record=record, index=len(turns), call=call, calls_left=calls_left, agent=agent)
            turn = _with_calls(turn, summaries)
        with stopped_clock():
            record = await agent.commit_turn(record, turn)
        turns.append(turn)
        readings.append(await _read(turns, task=task, agent=agent, verify=verify))
    answer = readings[-1].answer if plan is StopReason.ANSWER else None
    return RolloutResult(record=record, turns=tuple(turns), stop_reason=plan, answer=answer)


async def _read(turns: Sequence[Turn], *, task: Task, agent: Agent, verify: Verify | None) -> TurnReading:
    """The last of these turns, as the planner needs to know it."""
    reading = read_turn(turns[-1], schema=task.answer_schema, chat=agent.chat)
    if verify is None or reading.answer is None:
        return reading
    return replace(reading, is_right=await verify(turns))


def _is_put_down(turns: Sequence[Turn], *, num_before: int, started_at: datetime, agent: Agent) -> bool:
    """Whether the leg is over and another one can follow: from the committed turns, as after a takeover."""
    if agent.leg_limits is None:
        return False
    elapsed_s = (agent.clock() - started_at).total_seconds()
    is_over = agent.leg_limits.are_reached(turns, num_before=num_before, elapsed_s=elapsed_s)
    return is_over and not unresumable_tools(turns, toolbox=agent.toolbox)


async def _with_summary(
    plan: NextCall | SummaryWanted, *, planner: ContextPlanner | EpisodePlanner, turns: Sequence[Turn], agent: Agent
) -> tuple[NextCall | StopReason, list[BrowseCall]]:
    """The plan, with the summary it asks for. A summary that was never committed is written again after a takeover."""
    if isinstance(plan, NextCall):
        return plan, []
    branch = branch_turns(turns)
    calls = await agent.summariser.summarise_turns(branch, earlier=summary_of(branch[0]), query=planner.task.query)
    return planner.after_summary(turns, summary=calls[-1].text, wanted=plan), calls


def _with_calls(turn: Turn, calls: Sequence[BrowseCall]) -> Turn:
    dispatches = as_dispatches(calls, model=turn.model, start=len(turn.tools) + 1)
    return replace(turn, tools=(*turn.tools, *dispatches))


async def take_turn(
    task: Task, *, record: Record, index: int, call: NextCall, calls_left: int | None, agent: Agent
) -> Turn:
    """One planned model call and the tools it asks for. Raises EngineError when no engine can answer."""
    model = await ask_model(record, index=index, call=call, agent=agent)
    parsed = agent.chat.parse(str(model.response["text"]), tools=agent.visible_tools(task))
    has_answer = extract_answer(parsed.content, schema=task.answer_schema) is not None
    if FINAL_ANSWER in call.marks or (has_answer and agent.reflection.episode_unit == "episode"):
        return Turn(model=model)  # the attempt ends here: nobody would see the results of calls
    tools = await _call_tools(parsed, calls_left=calls_left, task=task, model=model, agent=agent)
    return Turn(model=model, tools=tuple(tools))


async def ask_model(record: Record, *, index: int, call: NextCall, agent: Agent) -> DispatchedSamplingTask:
    """One completion, as the Record's model call number `index`. Raises EngineError when no engine can answer."""
    params = replace(agent.sampling_params, seed=sampling_seed(record, turn=index, run_seed=agent.seed))
    started_at = agent.clock()
    reply = await agent.client.generate(
        GenerateRequest(
            rid=uuid4().hex,
            input_ids=[*call.context_ids, *call.prompt_ids],
            params=params,
            deadline_s=agent.inference.request_timeout_s,
            session=record.task_id,  # a group's requests share a service, so that they share its prefix cache
        )
    )
    text = agent.chat.completion_text(reply.output_ids)
    return _model_dispatch(
        record, turn=index, call=call, reply=reply, text=text, params=params, started_at=started_at,
        finished_at=agent.clock(),
    )  # fmt: skip


def _model_dispatch(
    record: Record,
    *,
    turn: int,
    call: NextCall,
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
                 "max_new_tokens": params.max_new_tokens, "seed": params.seed, **call.marks},
        response={"text": text, "num_cached_tokens": reply.num_cached_tokens, **_engine_times(reply)},
        started_at=started_at,
        finished_at=finished_at,
        tokens=TurnTokens(
            parent_turn=call.parent_turn,
            prompt_ids=call.prompt_ids,
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
    parsed: ParsedCompletion, *, calls_left: int | None, task: Task, model: DispatchedSamplingTask, agent: Agent
) -> list[DispatchedSamplingTask]:
    """Run the calls of one turn concurrently; results keep the order of the calls, those of the browse agent follow.

    Raises BudgetSpentError.
    """
    num_allowed = len(parsed.tool_calls) if calls_left is None else calls_left
    visible = {tool.name: tool for tool in agent.visible_tools(task)}
    try:
        async with asyncio.TaskGroup() as group:
            running = [
                group.create_task(
                    _call_tool(
                        call, index=index, is_over_limit=index > num_allowed, visible=visible, task=task, model=model,
                        agent=agent,
                    )
                )
                for index, call in enumerate(parsed.tool_calls, start=1)
            ]  # fmt: skip
    except BaseExceptionGroup as errors:
        raise first_refusal(errors) or errors from errors
    answered = [call.result() for call in running]
    browsed = [browse for _, browses in answered for browse in browses]
    return [*(call for call, _ in answered), *as_dispatches(browsed, model=model, start=len(answered) + 1)]


async def _call_tool(
    call: ToolRequest,
    *,
    index: int,
    is_over_limit: bool,
    visible: Mapping[str, ToolSpec],
    task: Task,
    model: DispatchedSamplingTask,
    agent: Agent,
) -> tuple[DispatchedSamplingTask, tuple[BrowseCall, ...]]:
    """One call, answered whatever is wrong with it, and the requests to the browse agent about its result."""
    started_at = agent.clock()
    result = _refusal(call, is_over_limit=is_over_limit, visible=visible, rollout=agent.rollout)
    if result is None:
        result = await _send(call, spec=visible[call.name], index=index, model=model, agent=agent)
    shown = await show_result(
        result, call=call, task=task, rollout=agent.rollout, chat=agent.chat, browser=agent.browser
    )
    answered = replace(
        model,
        id=f"{model.id}/{index}",
        index=index,
        kind=DispatchKind.TOOL,
        target=call.name,
        status=result.status.value,
        request={"name": call.name, "arguments": dict(call.arguments), "call_id": call.call_id},
        response={"content": shown.content, **shown.notes, **_origin(result)},
        started_at=started_at,
        finished_at=agent.clock(),
        tokens=None,
        error=result.error,
        cost_nano_usd=result.cost_nano_usd,
    )
    return answered, shown.browse_calls


def _refusal(
    call: ToolRequest, *, is_over_limit: bool, visible: Mapping[str, ToolSpec], rollout: RolloutConfig
) -> ToolResult | None:
    """What a call is answered that is not sent; None for one that is."""
    if is_over_limit:
        message = "not called: all the tool calls of this attempt are used up; answer from what you know"
        return ToolResult(status=ToolStatus.OVER_LIMIT, content=message, error=message)
    if call.error is not None:
        return ToolResult(status=ToolStatus.MALFORMED, content=call.error, error=call.error)
    if call.name not in visible:
        known = shorten(", ".join(sorted(visible)) or "none", width=_MAX_NAMES_CHARS, placeholder=" ...")
        message = f"unknown tool {call.name[:_MAX_NAME_CHARS]!r}; available: {known}"
        return ToolResult(status=ToolStatus.UNKNOWN_TOOL, content=message, error=message)
    return refused_address(call, rollout=rollout)


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
