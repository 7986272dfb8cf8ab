"""Meta-episodes (MR-Search): several attempts at one question in one Record, each after a reflection on those before.

    episode 0      question  A0 T1 A1 ... answer 0
    episode 1      request to reflect  A0 T1 ... answer 1          the model writes the reflection: part of episode 1
    episode 2      request to reflect  A0 ... answer 2

Within an episode everything is as in any other rollout (`context.py`). Between two, the request to reflect stands
behind all that was done (`reflection_context = full`), or behind the question and the last episodes alone (`last_k`): a
branch. The first call of an episode says in its `request.episode` which it is and how the one before ended. So what
comes next is a function of the committed turns here too.

The question is never lost: an episode that finds no room is not begun, and counts as present with score 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from agentrl.config import ReflectionConfig
from agentrl.rollout.context import (
    ContextPlanner,
    NextCall,
    SummaryWanted,
    episode_starts,
    num_tool_calls,
)
from agentrl.rollout.limits import TurnReading
from agentrl.types import EPISODE, EpisodeResult, StopReason, Task, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodePlanner:
    """Plans the model calls of a Record of several episodes. Pure, as the planner it asks about each of them."""

    within: ContextPlanner
    reflection: ReflectionConfig

    @property
    def task(self) -> Task:
        """The question."""
        return self.within.task

    def next_call(
        self, turns: Sequence[Turn], *, readings: Sequence[TurnReading]
    ) -> NextCall | SummaryWanted | StopReason:
        """What comes after these turns; `readings` are theirs."""
        plan = self.within.next_call(turns, readings=readings)
        if not isinstance(plan, StopReason):
            return plan
        return self._after_episode(turns, ended=plan, is_right=bool(readings) and readings[-1].is_right)

    def after_summary(self, turns: Sequence[Turn], *, summary: str, wanted: SummaryWanted) -> NextCall | StopReason:
        """The call that starts a branch from the question and a summary of what was done."""
        call = self.within.after_summary(turns, summary=summary, wanted=wanted)
        if isinstance(call, NextCall):
            return call
        following = self._after_episode(turns, ended=call, is_right=False)
        return following if isinstance(following, NextCall) else StopReason.CONTEXT_LIMIT

    def calls_left(self, turns: Sequence[Turn], *, call: NextCall) -> int | None:
        """Tool calls that the answer to a planned call may still make; None: any number."""
        return self.within.calls_left(turns, call=call)

    def _after_episode(
        self, turns: Sequence[Turn], *, ended: StopReason, is_right: bool
    ) -> NextCall | SummaryWanted | StopReason:
        """The next episode, or why the Record stops."""
        number = len(episode_starts(turns)) + 1
        if not turns or ended.is_infrastructure or is_right or number >= self.reflection.episodes:
            return ended
        mark = {"number": number, "after": ended.value}
        is_cut = self.reflection.reflection_context == "last_k"
        num_left_out = max(0, number - self.reflection.keep_episodes) if is_cut else 0
        plan = StopReason.CONTEXT_LIMIT if num_left_out else self.within.next_episode(turns, mark=mark)
        if is_cut and plan is StopReason.CONTEXT_LIMIT:
            first = [0, *episode_starts(turns)][num_left_out]
            return self.within.next_episode_after(turns, kept=range(first, len(turns)), mark=mark)
        return plan


def attempt_results(
    turns: Sequence[Turn], *, readings: Sequence[TurnReading], planner: EpisodePlanner, stop_reason: StopReason
) -> tuple[EpisodeResult, ...]:
    """What became of each attempt of a Record that stopped for this reason, not scored yet.

    Attempts that were to come and found no room are among them, without turns.
    """
    starts = episode_starts(turns)
    spans = list(pairwise([0, *starts, len(turns)])) if turns else []
    reasons = [StopReason(turns[start].model.request[EPISODE]["after"]) for start in starts]
    if turns:
        last = planner.within.next_call(turns, readings=readings)
        reasons.append(last if isinstance(last, StopReason) else StopReason.CONTEXT_LIMIT)
    results = [
        _result(
            turns[start:end],
            answer=readings[end - 1].answer if reason is StopReason.ANSWER else None,
            stop_reason=reason,
        )
        for (start, end), reason in zip(spans, reasons, strict=True)
    ]
    num_lost = 0 if stop_reason is StopReason.ANSWER else planner.reflection.episodes - len(results)
    return (*results, *[_LOST] * num_lost)


def step_results(
    turns: Sequence[Turn], *, readings: Sequence[TurnReading], stop_reason: StopReason
) -> tuple[EpisodeResult, ...]:
    """What became of each step of a Record that stopped for this reason, not scored yet.

    A step ends with the turn that calls tools, or with the Record. One without an answer beside its calls did not keep
    to the form.
    """
    ends = [position + 1 for position, reading in enumerate(readings[:-1]) if reading.num_calls]
    spans = list(pairwise([0, *ends, len(turns)])) if turns else []
    results: list[EpisodeResult] = []
    for start, end in spans:
        answer = readings[end - 1].answer
        missing = stop_reason if end == len(turns) else StopReason.FORMAT_ERROR
        reason = StopReason.ANSWER if answer is not None else missing
        results.append(_result(turns[start:end], answer=answer, stop_reason=reason))
    return tuple(results) or (_LOST,)


def turns_of_episodes(
    turns: Sequence[Turn], episodes: Sequence[EpisodeResult]
) -> Iterator[tuple[EpisodeResult, tuple[Turn, ...]]]:
    """Each episode and its turns, in order; none for one that was not begun."""
    start = 0
    for episode in episodes:
        yield episode, tuple(turns[start : start + episode.num_turns])
        start += episode.num_turns


def _result(turns: Sequence[Turn], *, answer: str | None, stop_reason: StopReason) -> EpisodeResult:
    return EpisodeResult(
        answer=answer,
        score=None,
        stop_reason=stop_reason,
        num_turns=len(turns),
        num_tool_calls=num_tool_calls(turns),
        num_completion_tokens=sum(len(turn.tokens.completion_ids) for turn in turns),
    )


_LOST = EpisodeResult(
    answer=None,
    score=None,
    stop_reason=StopReason.CONTEXT_LIMIT,
    num_turns=0,
    num_tool_calls=0,
    num_completion_tokens=0,
)
