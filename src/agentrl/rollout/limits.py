"""What a committed turn means, and when a rollout stops. Pure: decisions depend on committed turns alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.chat import ChatFormat
from agentrl.config import RolloutConfig
from agentrl.rollout.loops import loop_repeats
from agentrl.scoring import extract_answer
from agentrl.types import BRANCH, FINAL_ANSWER, DispatchKind, StopReason, ToolStatus, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnReading:
    """What the loop needs to know of a committed turn."""

    text: str
    is_truncated: bool  # cut by max_new_tokens
    answer: str | None  # from model tokens outside thinking and tool calls
    num_calls: int
    tools_are_away: bool
    loop_repeats: int = 0  # of the run of tokens that the completion ends in
    final_because: StopReason | None = None  # the limit for which this turn had to give the final answer
    starts_branch: bool = False  # its context was rewritten
    is_right: bool = False  # its answer, by the Task's scorer; False where nobody asked


def read_turn(turn: Turn, *, schema: str, chat: ChatFormat) -> TurnReading:
    """Interpret a turn from its stored text and tool results."""
    text = str(turn.model.response["text"])
    final_because = turn.model.request.get(FINAL_ANSWER)
    is_truncated = turn.tokens.finish_reason == "length"
    ids = turn.tokens.completion_ids
    calls = [call for call in turn.tools if call.kind is DispatchKind.TOOL]
    return TurnReading(
        text=text,
        is_truncated=is_truncated,
        answer=extract_answer(chat.parse(text).content, schema=schema),
        num_calls=len(calls),
        tools_are_away=any(ToolStatus(call.status).ends_record for call in calls),
        loop_repeats=loop_repeats(ids if is_truncated else ids[:-1]),
        final_because=None if final_because is None else StopReason(final_because),
        starts_branch=BRANCH in turn.model.request,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The bounds of one attempt: a Record, or an episode of it."""

    max_turns: int
    max_context_tokens: int  # longest context any model call may see
    max_identical_completions: int  # 0: any number
    max_loop_repeats: int  # 0: any number
    forces_final_answer: bool
    max_tool_calls: int | None = None  # None: any number

    @classmethod
    def from_config(cls, rollout: RolloutConfig, *, context_length: int, max_tool_calls: int | None = None) -> Limits:
        """Bounds from the settings; a completion must always fit behind the context."""
        return cls(
            max_turns=rollout.max_turns,
            max_context_tokens=min(rollout.max_prompt_tokens, context_length - rollout.max_new_tokens),
            max_identical_completions=max(0, rollout.repetition_early_stop_times),
            max_loop_repeats=rollout.max_loop_repeats,
            forces_final_answer=rollout.force_final_answer,
            max_tool_calls=max_tool_calls,
        )

    @property
    def last_turn(self) -> int:
        """Number of turns after which the attempt stops in any case."""
        return self.max_turns + (1 if self.forces_final_answer else 0)

    def are_calls_used_up(self, turns: Sequence[TurnReading]) -> bool:
        """Whether these turns made all the tool calls there may be."""
        return self.max_tool_calls is not None and sum(turn.num_calls for turn in turns) >= self.max_tool_calls


def decide_stop(turns: Sequence[TurnReading], *, limits: Limits) -> StopReason | None:
    """Why the attempt stops after these turns, or None to go on.

    Every limit is checked after every turn, whether or not it called a tool. The context limit needs the next
    prompt's size and is checked where that is made (context.py). Completions count as identical within a branch.
    """
    if not turns:
        return None
    last = turns[-1]
    if last.answer is not None and not last.num_calls:  # beside an answer calls are made where each step is scored
        return StopReason.ANSWER
    if last.tools_are_away:
        return StopReason.TOOL_ERROR
    if limits.max_loop_repeats and last.loop_repeats >= limits.max_loop_repeats and not last.num_calls:
        return StopReason.REPETITION
    if last.is_truncated and not last.num_calls:
        return StopReason.FORMAT_ERROR
    if last.final_because is not None:
        return last.final_because
    if len(turns) >= limits.last_turn:
        return StopReason.MAX_TURNS
    identical = sum(turn.text.strip() == last.text.strip() for turn in current_branch(turns))
    if limits.max_identical_completions and identical >= limits.max_identical_completions:
        return StopReason.REPETITION
    return None


def current_branch(turns: Sequence[TurnReading]) -> Sequence[TurnReading]:
    """The turns since the context was last rewritten."""
    start = max((position for position, turn in enumerate(turns) if turn.starts_branch), default=0)
    return turns[start:]
