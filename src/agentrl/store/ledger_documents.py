"""Documents of the trainer's and the fleet's side: training rows, ledger, policy versions, services, workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.store import codec
from agentrl.store.documents import Document, Encoded, check_format, with_payload
from agentrl.store.indexes import ENGINE_QUARANTINE, POLICY_VERSION, SEQUENCE, SERVICE, TRAIN_STEP, WORKER
from agentrl.types import (
    SCHEMA_VERSION,
    Alarm,
    CanaryAnswer,
    CanaryReference,
    DBRecordData,
    EngineQuarantine,
    InferenceService,
    PolicyVersion,
    ServiceStatus,
    StepStatus,
    TrainStep,
    Worker,
)

# --- DBRecordData -------------------------------------------------------------------------------------------------


def sequence_to_document(sequence: DBRecordData) -> Encoded:
    """A training row."""
    summary = sequence.summary
    arrays: dict[str, codec.Array | bytes] = {
        "token_ids": sequence.token_ids,
        "loss_mask": sequence.loss_mask,
        "advantages": sequence.advantages,
        "policy_versions": sequence.policy_versions,
    }
    if sequence.behaviour_logprobs is not None:
        arrays["behaviour_logprobs"] = sequence.behaviour_logprobs
    document = {
        "_id": sequence.id,
        "schema_version": SCHEMA_VERSION,
        "task_id": sequence.task_id,
        "record_id": sequence.record_id,
        "split": sequence.split,
        "num_tokens": summary.num_tokens,
        "num_trained_tokens": summary.num_trained_tokens,
        "min_policy_version": summary.min_policy_version,
        "reward": sequence.reward,
        "turn_ids": list(sequence.turn_ids),
    }
    if sequence.score_version is not None:
        document["score_version"] = sequence.score_version
    return with_payload(SEQUENCE, document, arrays)


def sequence_from_document(document: Mapping[str, Any], *, parts: Sequence[bytes]) -> DBRecordData:
    """A training row."""
    check_format(SEQUENCE, document)
    arrays: dict[str, Any] = codec.unpack(document["payload"], parts=parts)
    return DBRecordData(
        id=document["_id"],
        task_id=document["task_id"],
        record_id=document["record_id"],
        split=document["split"],
        token_ids=arrays["token_ids"],
        loss_mask=arrays["loss_mask"],
        advantages=arrays["advantages"],
        behaviour_logprobs=arrays.get("behaviour_logprobs"),
        policy_versions=arrays["policy_versions"],
        reward=document["reward"],
        turn_ids=tuple(document["turn_ids"]),
        score_version=document.get("score_version"),
    )


# --- TrainStep, PolicyVersion -------------------------------------------------------------------------------------


def step_to_document(step: TrainStep) -> Document:
    """A ledger entry. `task_ids` is indexed: a task knows every step that used it."""
    return {
        "_id": step.step,
        "schema_version": SCHEMA_VERSION,
        "status": step.status.value,
        "policy_version": step.policy_version,
        "task_ids": list(step.task_ids),
        "sequence_ids": list(step.sequence_ids),
        "dropped": [{"id": task_id, "reason": reason} for task_id, reason in step.dropped.items()],
        "retained": list(step.retained),
        "score_versions": [{"id": task_id, "version": version} for task_id, version in step.score_versions.items()],
        "metrics": codec.encode_json_value(step.metrics),
        "alarms": alarms_to_documents(step.alarms),
        "attempts": step.attempts,
        "planned_at": step.planned_at,
        "committed_at": step.committed_at,
        "checkpoint": step.checkpoint,
    }


def step_from_document(document: Mapping[str, Any]) -> TrainStep:
    """A ledger entry."""
    check_format(TRAIN_STEP, document)
    return TrainStep(
        step=document["_id"],
        status=StepStatus(document["status"]),
        policy_version=document["policy_version"],
        task_ids=tuple(document["task_ids"]),
        sequence_ids=tuple(document["sequence_ids"]),
        dropped={drop["id"]: drop["reason"] for drop in document["dropped"]},
        retained=tuple(document.get("retained", ())),
        score_versions={entry["id"]: entry["version"] for entry in document.get("score_versions", ())},
        metrics=codec.decode_json_value(document["metrics"]),
        alarms=tuple(_alarm_from_document(alarm) for alarm in document.get("alarms", ())),
        attempts=document["attempts"],
        planned_at=document["planned_at"],
        committed_at=document["committed_at"],
        checkpoint=document["checkpoint"],
    )


def alarms_to_documents(alarms: Sequence[Alarm]) -> list[Document]:
    """The alarms of a step as embedded in its entry."""
    return [
        {
            "name": alarm.name,
            "message": alarm.message,
            "steps": list(alarm.steps),
            "subjects": list(alarm.subjects),
        }
        for alarm in alarms
    ]


def _alarm_from_document(document: Mapping[str, Any]) -> Alarm:
    return Alarm(
        name=document["name"],
        message=document["message"],
        steps=tuple(document["steps"]),
        subjects=tuple(document["subjects"]),
    )


def policy_to_document(version: PolicyVersion) -> Document:
    """A published policy version. `version` repeats `_id` because only a secondary index serves ranges everywhere."""
    return {
        "_id": version.version,
        "schema_version": SCHEMA_VERSION,
        "version": version.version,
        "path": version.path,
        "created_at": version.created_at,
        "canary": None if version.canary is None else _reference_to_document(version.canary),
    }


def _reference_to_document(canary: CanaryReference) -> Document:
    return {"prompts": [list(prompt) for prompt in canary.prompts], "logprobs": list(canary.logprobs)}


def policy_from_document(document: Mapping[str, Any]) -> PolicyVersion:
    """A published policy version."""
    check_format(POLICY_VERSION, document)
    canary = document.get("canary")
    reference = canary and CanaryReference(
        prompts=tuple(tuple(prompt) for prompt in canary["prompts"]), logprobs=tuple(canary["logprobs"])
    )
    return PolicyVersion(
        version=document["version"], path=document["path"], created_at=document["created_at"], canary=reference
    )


# --- fleet --------------------------------------------------------------------------------------------------------


def service_to_document(service: InferenceService) -> Document:
    """An inference service without its heartbeat, which the server stamps."""
    return {
        "_id": service.id,
        "schema_version": SCHEMA_VERSION,
        "base_url": service.base_url,
        "status": service.status.value,
        "policy_version": service.policy_version,
        "engine": service.engine,
        "num_running": service.num_running,
        "num_waiting": service.num_waiting,
        "canary": None if service.canary is None else _answer_to_document(service.canary),
        "last_good_s": service.last_good_s,
    }


def _answer_to_document(answer: CanaryAnswer) -> Document:
    return {
        "policy_version": answer.policy_version,
        "logprobs": list(answer.logprobs),
        "started_s": answer.started_s,
        "finished_s": answer.finished_s,
    }


def _answer_from_document(document: Mapping[str, Any]) -> CanaryAnswer:
    return CanaryAnswer(
        policy_version=document["policy_version"],
        logprobs=tuple(document["logprobs"]),
        started_s=document["started_s"],
        finished_s=document["finished_s"],
    )


def service_from_document(document: Mapping[str, Any]) -> InferenceService:
    """An inference service."""
    check_format(SERVICE, document)
    return InferenceService(
        id=document["_id"],
        base_url=document["base_url"],
        status=ServiceStatus(document["status"]),
        policy_version=document["policy_version"],
        engine=document["engine"],
        num_running=document["num_running"],
        num_waiting=document["num_waiting"],
        heartbeat_at=document["heartbeat_at"],
        canary=None if document.get("canary") is None else _answer_from_document(document["canary"]),
        last_good_s=document.get("last_good_s", 0.0),
    )


def engine_quarantine_to_document(quarantine: EngineQuarantine) -> Document:
    """A quarantined span without `raised_at`, which the server stamps."""
    return {
        "_id": quarantine.id,
        "schema_version": SCHEMA_VERSION,
        "service_id": quarantine.service_id,
        "policy_version": quarantine.policy_version,
        "deviation": quarantine.deviation,
        "since_s": quarantine.since_s,
        "until_s": quarantine.until_s,
    }


def engine_quarantine_from_document(document: Mapping[str, Any]) -> EngineQuarantine:
    """A quarantined span."""
    check_format(ENGINE_QUARANTINE, document)
    return EngineQuarantine(
        id=document["_id"],
        service_id=document["service_id"],
        policy_version=document["policy_version"],
        deviation=document["deviation"],
        since_s=document["since_s"],
        until_s=document["until_s"],
        raised_at=document["raised_at"],
    )


def worker_to_document(worker: Worker) -> Document:
    """A worker without its heartbeat, which the server stamps."""
    return {
        "_id": worker.id,
        "schema_version": SCHEMA_VERSION,
        "kind": worker.kind,
        "host": worker.host,
        "pid": worker.pid,
        "num_running": worker.num_running,
        "phase": worker.phase,
        "started_at": worker.started_at,
    }


def worker_from_document(document: Mapping[str, Any]) -> Worker:
    """A worker."""
    check_format(WORKER, document)
    return Worker(
        id=document["_id"],
        kind=document["kind"],
        host=document["host"],
        pid=document["pid"],
        num_running=document["num_running"],
        phase=document["phase"],
        started_at=document["started_at"],
        heartbeat_at=document["heartbeat_at"],
    )
