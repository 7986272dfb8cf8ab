"""Domain values to MongoDB documents and back, by hand, one pair of functions per collection.

Every document carries `schema_version`; dates are UTC with millisecond precision (BSON). Mappings whose keys are ids
are stored as lists of {"id", ...}: ids may hold dots. Documents with TokenParts come as `Encoded`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from bson.binary import Binary

from agentrl.errors import StoredFormatError
from agentrl.store import codec
from agentrl.store.episode_documents import episode_from_document, episode_to_document
from agentrl.store.indexes import RECORD, TASK
from agentrl.types import (
    SCHEMA_VERSION,
    EngineUse,
    GroupOutcome,
    GroupSettlement,
    Record,
    RecordStatus,
    SequenceSummary,
    SettledGroup,
    StopReason,
    Task,
    TaskClaim,
    TaskStatus,
)

Document = dict[str, Any]

READABLE_SCHEMA_VERSIONS: Final = (1, SCHEMA_VERSION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A document and the TokenPart documents that must be there before it."""

    document: Document
    parts: tuple[Document, ...]


def utc_milliseconds(moment: datetime) -> datetime:
    """The moment as BSON keeps it."""
    moment = moment.astimezone(UTC)
    return moment.replace(microsecond=moment.microsecond // 1000 * 1000)


def check_format(collection: str, document: Mapping[str, Any]) -> None:
    """Raises StoredFormatError unless this release wrote the document, or an older one in the same format."""
    version = document.get("schema_version")
    payloads = [document.get("payload"), document.get("tokens", {}).get("prompt")]
    if version not in READABLE_SCHEMA_VERSIONS:
        readable = " and ".join(map(str, READABLE_SCHEMA_VERSIONS))
        found = f"has schema_version {version}, and this release reads {readable}"
    elif not all(payload is None or codec.is_known(payload) for payload in payloads):
        found = f"has schema_version {version}, but packs its arrays in a way that this release does not know"
    else:
        return
    raise StoredFormatError(
        f"{collection} {document.get('_id')} {found}: another release of AgentRL made this run. Read it, or export it "
        "with `agentrl db export`, with that release; with this one, start a run under another run_name"
    )


# --- Task ---------------------------------------------------------------------------------------------------------


def task_to_document(task: Task, *, slot: int) -> Document:
    """A pending Task. `slot` orders the claims: see claims.py."""
    return {
        "_id": task.id,
        "schema_version": SCHEMA_VERSION,
        "split": task.split,
        "epoch": task.epoch,
        "status": TaskStatus.PENDING.value,
        "slot": slot,
        "owner": None,
        "lease_until": None,
        "fence": 0,
        "attempt": 0,
        "settled_at": None,
        "item_id": task.item_id,
        "query": codec.encode_json_value(task.query),
        "answer": codec.encode_json_value(task.answer),
        "scorer": task.scorer,
        "answer_schema": task.answer_schema,
        "num_generations": task.num_generations,
        "system_prompt": codec.encode_json_value(task.system_prompt),
        "query_prompt": codec.encode_json_value(task.query_prompt),
        "tools": None if task.tools is None else list(task.tools),
        "metadata": codec.encode_json_value(task.metadata),
    }


def task_from_document(document: Mapping[str, Any]) -> Task:
    """The Task without its state."""
    check_format(TASK, document)
    tools = document["tools"]
    return Task(
        id=document["_id"],
        item_id=document["item_id"],
        split=document["split"],
        epoch=document["epoch"],
        query=codec.decode_json_value(document["query"]),
        answer=codec.decode_json_value(document["answer"]),
        scorer=document["scorer"],
        answer_schema=document["answer_schema"],
        num_generations=document["num_generations"],
        system_prompt=codec.decode_json_value(document["system_prompt"]),
        query_prompt=codec.decode_json_value(document["query_prompt"]),
        tools=None if tools is None else tuple(tools),
        metadata=codec.decode_json_value(document["metadata"]),
    )


def claim_from_document(document: Mapping[str, Any]) -> TaskClaim:
    """The claim a running Task document stands for."""
    return TaskClaim(
        task=task_from_document(document),
        owner=document["owner"],
        fence=document["fence"],
        lease_until=document["lease_until"],
    )


# --- settlement ---------------------------------------------------------------------------------------------------


def settlement_to_document(settlement: GroupSettlement, *, sequences: Sequence[SequenceSummary]) -> Document:
    """The decision on a group as embedded in its Task."""
    record_ids = dict.fromkeys([*settlement.scores, *settlement.rewards, *settlement.advantages])
    return {
        "outcome": settlement.outcome.value,
        "drop_reason": settlement.drop_reason,
        "num_failed": settlement.num_failed,
        "records": [
            {
                "id": record_id,
                "score": settlement.scores.get(record_id),
                "reward": settlement.rewards.get(record_id),
                "advantage": settlement.advantages.get(record_id),
                "untrained": settlement.untrained.get(record_id),
                **_episode_scores(settlement, record_id),
            }
            for record_id in record_ids
        ],
        "sequences": [
            {
                "id": sequence.id,
                "num_tokens": sequence.num_tokens,
                "num_trained_tokens": sequence.num_trained_tokens,
                "min_policy_version": sequence.min_policy_version,
                "num_shared_tokens": sequence.num_shared_tokens,
            }
            for sequence in sequences
        ],
        "engines": [[use.service_id, use.first_s, use.last_s] for use in settlement.engines],
        "score_version": settlement.score_version,
    }


def _episode_scores(settlement: GroupSettlement, record_id: str) -> Document:
    scores = settlement.episode_scores.get(record_id)
    return {} if scores is None else {"episode_scores": list(scores)}


def settlement_from_document(task_id: str, settlement: Mapping[str, Any]) -> GroupSettlement:
    """The decision embedded in the Task `task_id`."""
    records = settlement["records"]
    return GroupSettlement(
        task_id=task_id,
        outcome=GroupOutcome(settlement["outcome"]),
        drop_reason=settlement["drop_reason"],
        rewards={record["id"]: record["reward"] for record in records if record["reward"] is not None},
        advantages={record["id"]: record["advantage"] for record in records if record["advantage"] is not None},
        num_failed=settlement["num_failed"],
        scores={record["id"]: record["score"] for record in records if record.get("score") is not None},
        untrained={record["id"]: record["untrained"] for record in records if record.get("untrained") is not None},
        episode_scores={
            record["id"]: tuple(record["episode_scores"]) for record in records if record.get("episode_scores")
        },
        engines=tuple(
            EngineUse(service_id=service_id, first_s=first_s, last_s=last_s)
            for service_id, first_s, last_s in settlement.get("engines", ())
        ),
        score_version=settlement.get("score_version"),
    )


def settled_group_from_document(document: Mapping[str, Any]) -> SettledGroup:
    """A settled Task document as the planner sees it."""
    check_format(TASK, document)
    settlement = document["settlement"]
    return SettledGroup(
        settlement=settlement_from_document(document["_id"], settlement),
        sequences=tuple(SequenceSummary(**sequence) for sequence in settlement["sequences"]),
        settled_at=document["settled_at"],
        mean_tool_calls=document["mean_tool_calls"],
    )


# --- Record -------------------------------------------------------------------------------------------------------


def record_to_document(record: Record) -> Document:
    """A Record header. `num_turns` is what commits compare against."""
    return {
        "_id": record.id,
        "schema_version": SCHEMA_VERSION,
        "task_id": record.task_id,
        "split": record.split,
        "generation": record.generation,
        "fence": record.fence,
        "attempt": record.attempt,
        "num_turns": len(record.turn_ids),
        "turn_ids": list(record.turn_ids),
        "turn_prompt_tokens": list(record.turn_prompt_tokens),
        "num_prompt_tokens": record.num_prompt_tokens,
        "num_completion_tokens": record.num_completion_tokens,
        "num_tool_calls": record.num_tool_calls,
        "cost_nano_usd": record.cost_nano_usd,
        "started_at": record.started_at,
        "finished_at": record.finished_at,
        **final_record_fields(record),
    }


def final_record_fields(record: Record) -> Document:
    """The part of a header that `finish_record` writes, apart from the time."""
    return {
        "status": record.status.value,
        "stop_reason": None if record.stop_reason is None else record.stop_reason.value,
        "answer": codec.encode_json_value(record.answer),
        "score": record.score,
        "scorer": record.scorer,
        "turn_scores": list(record.turn_scores),
        "episodes": [episode_to_document(episode) for episode in record.episodes],
        "error": codec.encode_json_value(record.error),
        "worker": record.worker,
    }


def record_from_document(document: Mapping[str, Any]) -> Record:
    """A Record header."""
    check_format(RECORD, document)
    stop_reason = document["stop_reason"]
    return Record(
        id=document["_id"],
        task_id=document["task_id"],
        split=document["split"],
        generation=document["generation"],
        fence=document["fence"],
        status=RecordStatus(document["status"]),
        turn_ids=tuple(document["turn_ids"]),
        turn_prompt_tokens=tuple(document["turn_prompt_tokens"]),
        stop_reason=None if stop_reason is None else StopReason(stop_reason),
        answer=codec.decode_json_value(document["answer"]),
        score=document["score"],
        scorer=document["scorer"],
        turn_scores=tuple(document.get("turn_scores", ())),
        episodes=tuple(map(episode_from_document, document.get("episodes", ()))),
        error=codec.decode_json_value(document["error"]),
        worker=document["worker"],
        num_prompt_tokens=document["num_prompt_tokens"],
        num_completion_tokens=document["num_completion_tokens"],
        num_tool_calls=document["num_tool_calls"],
        cost_nano_usd=document.get("cost_nano_usd", 0),
        started_at=document["started_at"],
        finished_at=document["finished_at"],
        attempt=document.get("attempt", 1),
    )


def with_payload(
    collection: str,
    document: Document,
    arrays: Mapping[str, codec.Array | bytes],
    *,
    are_parts_named_by_content: bool = False,
) -> Encoded:
    """The document with its arrays packed, and the TokenParts that did not fit into it."""
    if not arrays:
        return Encoded(document=document, parts=())
    payload = codec.pack(arrays)
    header = payload.header
    if are_parts_named_by_content and payload.parts:
        header = {**header, "parts_of": f"{document['_id']}:{header['sha256']}"}
    parts = part_documents(codec.part_ids(collection, document["_id"], header), payload.parts)
    return Encoded(document={**document, "payload": header}, parts=parts)


def part_documents(ids: Sequence[str], parts: Sequence[bytes]) -> tuple[Document, ...]:
    """The TokenParts documents of these bytes."""
    return tuple(
        {"_id": part_id, "schema_version": SCHEMA_VERSION, "bytes": Binary(part)}
        for part_id, part in zip(ids, parts, strict=True)
    )
