"""How a rollout, or one episode of it, ended. Import them from `agentrl.types`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class StopReason(StrEnum):
    """Why a rollout ended. Closed: every Record has exactly one."""

    ANSWER = "answer"
    MAX_TURNS = "max_turns"
    CONTEXT_LIMIT = "context_limit"
    REPETITION = "repetition"
    FORMAT_ERROR = "format_error"
    ABORTED = "aborted"
    TOOL_ERROR = "tool_error"
    ENGINE_ERROR = "engine_error"
    JUDGE_ERROR = "judge_error"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"

    @property
    def is_infrastructure(self) -> bool:
        """Whether the system, not the policy, ended the rollout. Such Records never enter a group baseline."""
        return self in _INFRASTRUCTURE_STOPS


_INFRASTRUCTURE_STOPS = frozenset(
    {
        StopReason.ABORTED,
        StopReason.TOOL_ERROR,
        StopReason.ENGINE_ERROR,
        StopReason.JUDGE_ERROR,
        StopReason.TIMEOUT,
        StopReason.CANCELLED,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeResult:
    """One attempt inside a meta-episode. One without turns could not be had: there was no room for it (score 0)."""

    answer: str | None  # None: it gave none, for the reason in `stop_reason`
    score: float | None  # None: not scored yet, or its judge failed
    stop_reason: StopReason
    num_turns: int
    num_tool_calls: int
    num_completion_tokens: int  # sampled
