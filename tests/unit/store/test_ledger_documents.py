"""Rows, ledger entries, services and workers survive the trip through their documents."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import bson
from bson.codec_options import CodecOptions

from agentrl.store import ledger_documents
from agentrl.types import Alarm, InferenceService, PolicyVersion, ServiceStatus, StepStatus, TrainStep, Worker
from factories import make_sequence

OPTIONS: CodecOptions[dict[str, Any]] = CodecOptions(tz_aware=True, tzinfo=UTC)
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def through_bson(document: dict[str, Any]) -> dict[str, Any]:
    return bson.decode(bson.encode(document), codec_options=OPTIONS)


def test_a_row_carries_its_summary_beside_the_packed_arrays() -> None:
    row = make_sequence(prompt_ids=range(10), completion_ids=range(4), version=6)
    document = ledger_documents.sequence_to_document(row).document
    assert (document["num_tokens"], document["num_trained_tokens"], document["min_policy_version"]) == (14, 4, 6)
    assert ledger_documents.sequence_from_document(through_bson(document), parts=()).summary == row.summary


def test_ledger_entries_read_back_equal() -> None:
    step = TrainStep(
        step=3,
        status=StepStatus.COMMITTED,
        policy_version=2,
        task_ids=("train:0:a.b", "train:0:c"),
        sequence_ids=("s0", "s1"),
        dropped={"train:0:c": "stale"},
        metrics={"loss/policy": 0.25, "clip.fraction": 0.0},
        alarms=(Alarm(name="zero_signal", message="m", steps=(2, 3), subjects=("train:0:c",)),),
        attempts=2,
        planned_at=NOW,
        committed_at=NOW,
        checkpoint="step-3",
    )
    assert ledger_documents.step_from_document(through_bson(ledger_documents.step_to_document(step))) == step


def test_policy_versions_read_back_equal() -> None:
    version = PolicyVersion(version=4, path="policies/4", created_at=NOW)
    document = through_bson(ledger_documents.policy_to_document(version))
    assert ledger_documents.policy_from_document(document) == version


def test_services_and_workers_read_back_equal_with_the_heartbeat_the_server_stamped() -> None:
    service = InferenceService(
        id="s", base_url="http://h:1", status=ServiceStatus.UP, policy_version=2, num_waiting=1, heartbeat_at=NOW
    )
    worker = Worker(id="w", kind="trainer", host="h", pid=3, phase="step 4", started_at=NOW, heartbeat_at=NOW)
    stored_service = through_bson({**ledger_documents.service_to_document(service), "heartbeat_at": NOW})
    stored_worker = through_bson({**ledger_documents.worker_to_document(worker), "heartbeat_at": NOW})
    assert ledger_documents.service_from_document(stored_service) == service
    assert ledger_documents.worker_from_document(stored_worker) == worker
