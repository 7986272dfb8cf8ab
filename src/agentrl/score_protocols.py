"""The seams of chat models beside the policy and of scoring history; protocols.py exports them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from agentrl.types import ChatReply, DispatchedSamplingTask, JudgeVerdict, Record, Score


class ChatModel(Protocol):
    """A chat model that is not the policy: judges, browse agents, summarisers. Text in, text out."""

    @property
    def models(self) -> Sequence[str]:
        """Names of the models it may answer with, in the order they are tried."""
        ...

    async def complete(self, messages: Sequence[Mapping[str, str]], *, deadline_s: float) -> ChatReply:
        """One reply to [{"role", "content"}, ...] within `deadline_s`, retries and failover included.

        Raises ChatError; never returns an empty text for a failure.
        """
        ...

    async def close(self) -> None:
        """Release connections."""
        ...


class VerdictCache(Protocol):
    """What judges said before."""

    async def find_verdicts(self, keys: Sequence[str]) -> dict[str, JudgeVerdict]:
        """The known ones, by key."""
        ...

    async def put_verdict(self, verdict: JudgeVerdict) -> JudgeVerdict:
        """Keep a verdict. Returns the one kept: the first one under its key stays."""
        ...


class ScoreStore(VerdictCache, Protocol):
    """Scores beside the one a Record was finished with: append-only, by version of the scorer."""

    async def put_calls(self, calls: Sequence[DispatchedSamplingTask]) -> None:
        """Keep judge calls of Records; they belong to no turn. Ids already there are left alone."""
        ...

    async def list_calls(self, record_id: str) -> list[DispatchedSamplingTask]:
        """The judge calls of a Record, oldest first."""
        ...

    async def put_score(self, score: Score) -> Score:
        """Keep a score. Returns the one kept: the first of an attempt and version stays."""
        ...

    async def find_scores(self, records: Sequence[Record], *, version: str) -> dict[str, Score]:
        """Scores of these Records' present attempts under a version, by record id; those without one are left out."""
        ...

    async def count_scores(self) -> dict[str, int]:
        """How many Records each version has scored, by version."""
        ...
