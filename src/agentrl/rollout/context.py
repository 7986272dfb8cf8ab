"""What the model sees next, as a function of the committed turns: another process plans the same call. Pure.

    the turns so far ─► a limit ends the Record? ──────────────────────────────► its stop reason
           │ no, or a repetition that a new context may break
           ▼
    results (or a nudge) fit behind the context? ──yes──► go on in this branch
           │ no
    new_context set, and the rewritten context fits? ──yes──► a new branch (parent -1), marked in its first turn
           │ no
    force_final_answer? ──yes──► ask for the answer in the room kept for it, the results left out ──no──► context_limit

Room for the final answer is one completion and the request for it: other calls must leave it free behind them.

A rewritten context is put together from token ids: the first prompt, then kept completions exactly as they were
sampled, each with what answered it. So nothing the model said is decoded and encoded again, whatever is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl.chat import ChatFormat, Message
from agentrl.config import RolloutConfig
from agentrl.rollout.limits import Limits, TurnReading, decide_stop
from agentrl.types import BRANCH, EPISODE, FINAL_ANSWER, DispatchKind, StopReason, Task, ToolSpec, Turn

REFLECTION = "reflection"  # why a branch starts with an episode
DISCARDED = "[This result was discarded to save room. Call the tool again if you need it.]"


@dataclass(frozen=True, slots=True, kw_only=True)
class NextCall:
    """One model call: what it sees, where it hangs, and why it is not just the next one."""

    parent_turn: int  # -1: a branch starts here
    context_ids: Sequence[int]  # of the parent chain
    prompt_ids: tuple[int, ...]
    marks: Mapping[str, Any] = field(default_factory=dict)  # kept in the request of the call


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryWanted:
    """The context is to be replaced by a summary of itself, which somebody has to write."""

    reason: StopReason  # the limit that asked for it
    request: str = ""  # what the model is asked to do after reading it; empty: to go on
    marks: Mapping[str, Any] = field(default_factory=dict)  # for the call that sees it


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextPlanner:
    """Plans the model calls of one Record, within the episode that its last turns belong to."""

    task: Task
    tools: Sequence[ToolSpec]
    chat: ChatFormat
    rollout: RolloutConfig
    limits: Limits
    limit_tokens: int  # longest context of a call that is not the forced final one
    reflection_prompt: str  # stands between two episodes

    @classmethod
    def build(
        cls,
        task: Task,
        *,
        tools: Sequence[ToolSpec],
        chat: ChatFormat,
        rollout: RolloutConfig,
        limits: Limits,
        reflection_prompt: str,
    ) -> ContextPlanner:
        """A planner that knows how much room the final answer needs."""
        limit_tokens = limits.max_context_tokens
        if limits.forces_final_answer:
            request = chat.render_continuation([_final_request(rollout)], completion_ids=(), tools=tools)
            limit_tokens -= rollout.max_new_tokens + len(request)
        return cls(
            task=task, tools=tools, chat=chat, rollout=rollout, limits=limits, limit_tokens=limit_tokens,
            reflection_prompt=reflection_prompt,
        )  # fmt: skip

    def next_call(
        self, turns: Sequence[Turn], *, readings: Sequence[TurnReading]
    ) -> NextCall | SummaryWanted | StopReason:
        """What comes after these turns; `readings` are theirs."""
        readings = readings[episode_start(turns) :]
        stop = decide_stop(readings, limits=self.limits)
        if stop is not None and not (stop is StopReason.REPETITION and self._breaks_repetition(readings)):
            return stop
        if not turns:
            prompt_ids = self.chat.render_prompt(initial_messages(self.task, rollout=self.rollout), tools=self.tools)
            fits = len(prompt_ids) <= self.limits.max_context_tokens
            return NextCall(parent_turn=-1, context_ids=(), prompt_ids=prompt_ids) if fits else StopReason.CONTEXT_LIMIT
        context_ids = chain_ids(turns)
        if self._is_last(readings):
            return self._final_call(turns, context_ids=context_ids, because=StopReason.MAX_TURNS)
        prompt_ids = self._continuation(turns[-1])
        if stop is None and len(context_ids) + len(prompt_ids) <= self.limit_tokens:
            return NextCall(parent_turn=len(turns) - 1, context_ids=context_ids, prompt_ids=prompt_ids)
        return self._new_branch(turns, because=stop or StopReason.CONTEXT_LIMIT, context_ids=context_ids)

    def after_summary(self, turns: Sequence[Turn], *, summary: str, wanted: SummaryWanted) -> NextCall | StopReason:
        """The call that starts a branch from the question and a summary of what was done."""
        messages = initial_messages(self.task, rollout=self.rollout)
        asked = messages[-1]
        parts = (asked["content"], f"{self.rollout.summary_prompt}\n{summary}", wanted.request)
        messages[-1] = {**asked, "content": "\n\n".join(part for part in parts if part)}
        prompt_ids = self.chat.render_prompt(messages, tools=self.tools)
        if len(prompt_ids) <= self.limit_tokens:
            call = self._branch(prompt_ids, because=wanted.reason)
            return replace(call, marks={**call.marks, **wanted.marks})
        if EPISODE in wanted.marks:
            return StopReason.CONTEXT_LIMIT  # the episode before is over: nothing is left to ask for
        return self._without_new_context(turns, because=wanted.reason, context_ids=chain_ids(turns))

    def calls_left(self, turns: Sequence[Turn], *, call: NextCall) -> int | None:
        """Tool calls that the answer to a planned call may still make; None: any number."""
        if self.limits.max_tool_calls is None:
            return None
        own_turns = () if EPISODE in call.marks else turns[episode_start(turns) :]
        return max(0, self.limits.max_tool_calls - num_tool_calls(own_turns))

    def next_episode(self, turns: Sequence[Turn], *, mark: Mapping[str, Any]) -> NextCall | SummaryWanted | StopReason:
        """The call that asks for another attempt behind all that was done; `context_limit` if there is no room.

        Without room for the last tool results the request stands in their place, as for a forced final answer; without
        room for that either, `new_context` decides what of the earlier attempts is kept.
        """
        marks = {EPISODE: mark}
        context_ids = chain_ids(turns)
        request = self._reflection_request()
        for messages in ([*_tool_messages(turns[-1], is_discarded=False), request], [request]):
            prompt_ids = self._render_after(turns[-1], messages)
            if len(context_ids) + len(prompt_ids) <= self.limit_tokens:
                parent = len(turns) - 1
                return NextCall(parent_turn=parent, context_ids=context_ids, prompt_ids=prompt_ids, marks=marks)
        if self.rollout.new_context == "disabled":
            return StopReason.CONTEXT_LIMIT
        if self.rollout.new_context == "discard_all":
            return SummaryWanted(reason=StopReason.CONTEXT_LIMIT, request=self.reflection_prompt, marks=marks)
        kept = range(len(turns))
        if self.rollout.new_context == "last_k":
            kept = kept[-self.rollout.last_k_turns :]
        rewritten = self._overflowing(turns, kept, opens_episode=True)
        if rewritten is None:
            return StopReason.CONTEXT_LIMIT
        call = self._branch(rewritten, because=StopReason.CONTEXT_LIMIT)
        return replace(call, marks={**call.marks, **marks})

    def next_episode_after(
        self, turns: Sequence[Turn], *, kept: Sequence[int], mark: Mapping[str, Any]
    ) -> NextCall | StopReason:
        """The call that asks for another attempt behind the question and the turns at `kept` alone.

        Of those, as many as fit, newest first; `context_limit` if not even the newest one does.
        """
        rewritten = self._assembled(turns, kept, room=self.limit_tokens, opens_episode=True, discards_results=False)
        if rewritten is None:
            return StopReason.CONTEXT_LIMIT
        marks = {BRANCH: {"strategy": "last_k", "because": REFLECTION}, EPISODE: mark}
        return NextCall(parent_turn=-1, context_ids=(), prompt_ids=rewritten, marks=marks)

    def _is_last(self, readings: Sequence[TurnReading]) -> bool:
        """Whether the next call is the last of its attempt."""
        return len(readings) >= self.limits.max_turns or self.limits.are_calls_used_up(readings)

    def _breaks_repetition(self, readings: Sequence[TurnReading]) -> bool:
        """Whether a repetition is answered with a new context: as long as there are turns left for it."""
        is_wanted = self.rollout.enable_repetition_compress and self.rollout.new_context != "disabled"
        return is_wanted and not self._is_last(readings) and readings[-1].final_because is None

    def _continuation(self, turn: Turn, *, is_discarded: bool = False, ends_episode: bool = False) -> tuple[int, ...]:
        """What answers a turn: its tool results, else the nudge; at the end of an episode the request to reflect."""
        messages = _tool_messages(turn, is_discarded=is_discarded)
        if ends_episode:
            messages.append(self._reflection_request())
        return self._render_after(turn, messages or [{"role": "user", "content": self.rollout.nudge_prompt}])

    def _reflection_request(self) -> Message:
        return {"role": "user", "content": self.reflection_prompt}

    def _render_after(self, turn: Turn, messages: Sequence[Message]) -> tuple[int, ...]:
        return self.chat.render_continuation(messages, completion_ids=turn.tokens.completion_ids, tools=self.tools)

    def _final_call(
        self, turns: Sequence[Turn], *, context_ids: Sequence[int], because: StopReason
    ) -> NextCall | StopReason:
        """The last call: after the last results if they fit, else without them where an answer is asked for."""
        request = [_final_request(self.rollout)] if self.limits.forces_final_answer else []
        for messages in ([*_tool_messages(turns[-1], is_discarded=False), *request], request):
            if not messages:
                continue
            prompt_ids = self._render_after(turns[-1], messages)
            if len(context_ids) + len(prompt_ids) <= self.limits.max_context_tokens:
                return NextCall(
                    parent_turn=len(turns) - 1,
                    context_ids=context_ids,
                    prompt_ids=prompt_ids,
                    marks={FINAL_ANSWER: because.value},
                )
        return StopReason.CONTEXT_LIMIT

    def _new_branch(
        self, turns: Sequence[Turn], *, because: StopReason, context_ids: Sequence[int]
    ) -> NextCall | SummaryWanted | StopReason:
        strategy = self.rollout.new_context
        if strategy == "discard_all":
            return SummaryWanted(reason=because)
        rewritten = None if strategy == "disabled" else self._rewritten(turns, because=because)
        if rewritten is not None:
            return self._branch(rewritten, because=because)
        return self._without_new_context(turns, because=because, context_ids=context_ids)

    def _without_new_context(
        self, turns: Sequence[Turn], *, because: StopReason, context_ids: Sequence[int]
    ) -> NextCall | StopReason:
        if because is StopReason.CONTEXT_LIMIT and self.limits.forces_final_answer:
            return self._final_call(turns, context_ids=context_ids, because=because)
        return because

    def _branch(self, prompt_ids: tuple[int, ...], *, because: StopReason) -> NextCall:
        marks = {BRANCH: {"strategy": self.rollout.new_context, "because": because.value}}
        return NextCall(parent_turn=-1, context_ids=(), prompt_ids=prompt_ids, marks=marks)

    def _rewritten(self, turns: Sequence[Turn], *, because: StopReason) -> tuple[int, ...] | None:
        """The first prompt and as many of the kept turns, newest first, as leave half of the room free.

        None if not even the newest one fits. After a repetition the repeated turns are not kept.
        """
        kept = list(range(len(turns)))
        if because is StopReason.REPETITION:
            repeated = _text(turns[-1])
            kept = [position for position in kept if _text(turns[position]) != repeated]
        if self.rollout.new_context == "last_k":
            kept = kept[-self.rollout.last_k_turns :]
        return self._overflowing(turns, kept, opens_episode=False)

    def _overflowing(
        self, turns: Sequence[Turn], kept: Sequence[int], *, opens_episode: bool
    ) -> tuple[int, ...] | None:
        """What is kept of a full context: half its room is to be free, `new_context` says what of the results stays."""
        return self._assembled(
            turns, kept, room=self.limit_tokens // 2, opens_episode=opens_episode,
            discards_results=self.rollout.new_context == "discard_all_tools",
        )  # fmt: skip

    def _assembled(
        self, turns: Sequence[Turn], kept: Sequence[int], *, room: int, opens_episode: bool, discards_results: bool
    ) -> tuple[int, ...] | None:
        """The first prompt and the turns at `kept` that fit in `room`, newest first, each with what answered it.

        The newest one only has to fit at all, without its results if need be; None if it does not. `opens_episode`: the
        last turn of all is answered with the request to reflect. `discards_results`: but those of the newest turn.
        """
        ends = {position - 1 for position in episode_starts(turns)} | ({len(turns) - 1} if opens_episode else set())
        first = turns[0].tokens.prompt_ids
        segments: list[tuple[int, ...]] = []
        for position in reversed(kept):
            discards = discards_results and bool(segments)
            segment = self._segment(turns[position], is_discarded=discards, ends_episode=position in ends)
            size = len(first) + sum(map(len, segments)) + len(segment)
            if size > (room if segments else self.limit_tokens):
                break
            segments.append(segment)
        if kept and not segments:
            newest = kept[-1]
            segments = [self._segment(turns[newest], is_discarded=True, ends_episode=newest in ends)]
        rewritten = (*first, *(token for segment in reversed(segments) for token in segment))
        return rewritten if len(rewritten) <= self.limit_tokens else None

    def _segment(self, turn: Turn, *, is_discarded: bool, ends_episode: bool) -> tuple[int, ...]:
        """A kept turn: what was sampled, and what answered it."""
        answer = self._continuation(turn, is_discarded=is_discarded, ends_episode=ends_episode)
        return (*turn.tokens.completion_ids, *answer)


def _tool_messages(turn: Turn, *, is_discarded: bool) -> list[Message]:
    return [
        {
            "role": "tool",
            "tool_call_id": str(call.request["call_id"]),
            "name": str(call.request["name"]),
            "content": DISCARDED if is_discarded else str(call.response["content"]),
        }
        for call in turn.tools
        if call.kind is DispatchKind.TOOL
    ]


def _final_request(rollout: RolloutConfig) -> Message:
    return {"role": "user", "content": rollout.final_answer_prompt}


def _text(turn: Turn) -> str:
    return str(turn.model.response["text"]).strip()


def num_tool_calls(turns: Sequence[Turn]) -> int:
    """Tool calls that these turns asked for, whatever became of them."""
    return sum(call.kind is DispatchKind.TOOL for turn in turns for call in turn.tools)


def episode_starts(turns: Sequence[Turn]) -> list[int]:
    """Positions of the turns that start an episode after the first."""
    return [position for position, turn in enumerate(turns) if EPISODE in turn.model.request]


def episode_start(turns: Sequence[Turn]) -> int:
    """Position of the first turn of the episode that the last turn belongs to."""
    return max(episode_starts(turns), default=0)


def branch_turns(turns: Sequence[Turn]) -> list[Turn]:
    """The ancestors of the last turn and itself, from the root of its branch."""
    chain: list[Turn] = []
    position = len(turns) - 1
    while position >= 0:
        chain.append(turns[position])
        position = turns[position].tokens.parent_turn
    return chain[::-1]


def chain_ids(turns: Sequence[Turn]) -> list[int]:
    """The context behind the last turn: prompts and completions of its branch."""
    return [token for turn in branch_turns(turns) for token in (*turn.tokens.prompt_ids, *turn.tokens.completion_ids)]


def initial_messages(task: Task, *, rollout: RolloutConfig) -> list[dict[str, str]]:
    """System and user message of a Task."""
    system = task.system_prompt if task.system_prompt is not None else rollout.system_prompt
    query = task.query_prompt.replace("{query}", task.query) if task.query_prompt else task.query
    head = [{"role": "system", "content": system}] if system else []
    return [*head, {"role": "user", "content": query}]
