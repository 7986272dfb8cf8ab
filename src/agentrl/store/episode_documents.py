"""The episodes of a meta-episode as embedded in their Record's header."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.store import codec
from agentrl.types import EpisodeResult, StopReason


def episode_to_document(episode: EpisodeResult) -> dict[str, Any]:
    """What became of one episode."""
    return {
        "answer": codec.encode_json_value(episode.answer),
        "score": episode.score,
        "stop_reason": episode.stop_reason.value,
        "num_turns": episode.num_turns,
        "num_tool_calls": episode.num_tool_calls,
        "num_completion_tokens": episode.num_completion_tokens,
    }


def episode_from_document(document: Mapping[str, Any]) -> EpisodeResult:
    """What became of one episode."""
    return EpisodeResult(
        answer=codec.decode_json_value(document["answer"]),
        score=document["score"],
        stop_reason=StopReason(document["stop_reason"]),
        num_turns=document["num_turns"],
        num_tool_calls=document["num_tool_calls"],
        num_completion_tokens=document["num_completion_tokens"],
    )
