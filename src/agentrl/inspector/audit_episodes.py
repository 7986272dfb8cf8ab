"""Checks on the episodes of one Record: they add up to it, and to its turns. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from agentrl.algo.credit import turn_scores_of
from agentrl.inspector.audit_facts import GroupFacts
from agentrl.inspector.audit_report import Check, Finding
from agentrl.types import EPISODE, DispatchKind, EpisodeResult, Record, RecordStatus, StopReason, Turn


def check_episodes(record: Record, facts: GroupFacts) -> Iterator[Finding]:
    """What a meta-episode says of its episodes follows from its turns, and its score from theirs."""
    turns = facts.turns_of(record)
    messages = _header_faults(record) if record.episodes else _missing_episodes(turns or (), record=record)
    for message in messages:
        yield Finding(check=Check.EPISODES, subject=record.id, message=message)
    if turns is None or sum(episode.num_turns for episode in record.episodes) != len(turns):
        return
    start = 0
    for number, episode in enumerate(record.episodes):
        own_turns = turns[start : start + episode.num_turns]
        start += episode.num_turns
        for message in _turn_faults(episode, own_turns, number=number, following=turns[start : start + 1]):
            yield Finding(check=Check.EPISODES, subject=record.id, message=f"episode {number}: {message}")


def _missing_episodes(turns: Sequence[Turn], *, record: Record) -> Iterator[str]:
    if record.status is RecordStatus.FINISHED and any(EPISODE in turn.model.request for turn in turns):
        yield "its turns start episodes, but none are recorded"


def _header_faults(record: Record) -> Iterator[str]:
    episodes = record.episodes
    num_turns = sum(episode.num_turns for episode in episodes)
    if num_turns != len(record.turn_ids):
        yield f"its episodes have {num_turns} turns, it has {len(record.turn_ids)}"
    begun = [episode.num_turns > 0 for episode in episodes]
    if begun != sorted(begun, reverse=True):
        yield "an episode without turns stands before one that has some"
    if record.status is RecordStatus.FAILED:
        if any(episode.score is not None for episode in episodes):
            yield "failed, but episodes of it have scores: an error is never a score"
        return
    if any(episode.score is None or not math.isfinite(episode.score) for episode in episodes):
        yield f"finished with episode scores {[episode.score for episode in episodes]}"
    if (record.answer, record.score) != (episodes[-1].answer, episodes[-1].score):
        yield f"its score is {record.score}, that of its last episode {episodes[-1].score}; or its answer another one"
    if record.turn_scores != turn_scores_of(episodes):
        yield f"turn_scores {record.turn_scores} are not the scores of its episodes"


def _turn_faults(
    episode: EpisodeResult, turns: Sequence[Turn], *, number: int, following: Sequence[Turn]
) -> Iterator[str]:
    counted = (
        sum(call.kind is DispatchKind.TOOL for turn in turns for call in turn.tools),
        sum(len(turn.tokens.completion_ids) for turn in turns),
    )
    if (episode.num_tool_calls, episode.num_completion_tokens) != counted:
        yield (
            f"{episode.num_tool_calls} tool calls and {episode.num_completion_tokens} sampled tokens, its turns add up "
            f"to {counted[0]} and {counted[1]}"
        )
    if episode.stop_reason.is_infrastructure:
        yield f"stopped with {episode.stop_reason.value}, which fails the whole Record"
    if (episode.answer is not None) != (episode.stop_reason is StopReason.ANSWER):
        yield f"answer {episode.answer}, but stop reason {episode.stop_reason.value}"
    if not turns and episode.score not in {None, 0.0}:
        yield f"was never begun, but has score {episode.score}"
    if any(EPISODE in turn.model.request for turn in turns[1:]):
        yield "another episode is recorded to start within it"
    yield from _boundary_faults(episode, turns, number=number, following=following)


def _boundary_faults(
    episode: EpisodeResult, turns: Sequence[Turn], *, number: int, following: Sequence[Turn]
) -> Iterator[str]:
    """An attempt ends where the next one is recorded to start, a step with tool calls."""
    if not turns or not following:
        return
    mark = following[0].model.request.get(EPISODE)
    if mark is None and not any(call.kind is DispatchKind.TOOL for call in turns[-1].tools):
        yield "ends with a turn that calls no tools, and none is recorded to start after it"
    if mark is not None and mark != {"number": number + 1, "after": episode.stop_reason.value}:
        yield f"stopped with {episode.stop_reason.value}, the next one is recorded as {mark}"
