"""Scores, judge calls and verdicts of a MemoryStore."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.types import DispatchedSamplingTask, JudgeVerdict, Record, Score


class MemoryScores:
    """agentrl.protocols.ScoreStore in dictionaries."""

    def __init__(self) -> None:
        self._scores: dict[str, Score] = {}
        self._judge_calls: dict[str, DispatchedSamplingTask] = {}
        self._verdicts: dict[str, JudgeVerdict] = {}

    async def find_verdicts(self, keys: Sequence[str]) -> dict[str, JudgeVerdict]:
        """See VerdictCache.find_verdicts."""
        return {key: self._verdicts[key] for key in keys if key in self._verdicts}

    async def put_verdict(self, verdict: JudgeVerdict) -> JudgeVerdict:
        """See VerdictCache.put_verdict."""
        return self._verdicts.setdefault(verdict.key, verdict)

    async def put_calls(self, calls: Sequence[DispatchedSamplingTask]) -> None:
        """See ScoreStore.put_calls."""
        for call in calls:
            self._judge_calls.setdefault(call.id, call)

    async def list_calls(self, record_id: str) -> list[DispatchedSamplingTask]:
        """See ScoreStore.list_calls."""
        calls = [call for call in self._judge_calls.values() if call.record_id == record_id]
        return sorted(calls, key=lambda call: (call.started_at, call.id))

    async def put_score(self, score: Score) -> Score:
        """See ScoreStore.put_score."""
        return self._scores.setdefault(score.id, score)

    async def find_scores(self, records: Sequence[Record], *, version: str) -> dict[str, Score]:
        """See ScoreStore.find_scores."""
        attempts = {record.id: record.attempt for record in records}
        return {
            score.record_id: score
            for score in self._scores.values()
            if score.version == version and attempts.get(score.record_id) == score.attempt
        }

    async def count_scores(self) -> dict[str, int]:
        """See ScoreStore.count_scores."""
        versions = sorted(score.version for score in self._scores.values())
        return {version: versions.count(version) for version in dict.fromkeys(versions)}
