"""Domain values survive the trip through their documents."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from agentrl.store import documents
from agentrl.types import EpisodeResult, GroupOutcome, RecordStatus, StopReason
from bson_trip import through_bson
from factories import make_record, make_settlement, make_task


def test_records_read_back_equal_in_every_state() -> None:
    running = replace(
        make_record(turn_ids=("a", "b")), turn_prompt_tokens=(3, 9), started_at=datetime(2026, 1, 1, tzinfo=UTC)
    )
    final = replace(running, status=RecordStatus.FAILED, stop_reason=StopReason.TIMEOUT, error="late \ud800")
    episode = EpisodeResult(
        answer="\ud800",
        score=0.5,
        stop_reason=StopReason.ANSWER,
        num_turns=2,
        num_tool_calls=1,
        num_completion_tokens=9,
    )
    lost = replace(episode, answer=None, score=None, stop_reason=StopReason.CONTEXT_LIMIT, num_turns=0)
    meta = replace(final, episodes=(episode, lost), turn_scores=(None, 0.5))
    for record in (running, final, meta):
        assert documents.record_from_document(through_bson(documents.record_to_document(record))) == record


def test_settlements_keep_ids_with_dots_and_records_without_reward() -> None:
    task = make_task("a.b.$c", num_generations=3)
    settlement = make_settlement(task, rewards=(1.0, 0.0), outcome=GroupOutcome.TRAINABLE)
    settlement = replace(settlement, episode_scores={f"{task.id}/g0": (0.0, 1.0)})
    stored = through_bson(documents.settlement_to_document(settlement, sequences=[]))
    assert documents.settlement_from_document(task.id, stored) == settlement


def test_moments_are_kept_in_utc_milliseconds() -> None:
    moment = datetime.fromisoformat("2026-01-01T02:00:00.123987+02:00")
    assert documents.utc_milliseconds(moment) == datetime(2026, 1, 1, 0, 0, 0, 123000, tzinfo=UTC)
