"""Model and tool calls to documents and back. The prompt that the first turns of a group share is stored once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from agentrl.store import codec
from agentrl.store.dispatch_fields import implied_place, place_to_fields, spans_from_fields, spans_to_fields
from agentrl.store.documents import Document, Encoded, check_format, part_documents, with_payload
from agentrl.store.indexes import DISPATCH
from agentrl.types import SCHEMA_VERSION, DispatchedSamplingTask, DispatchKind, Turn, TurnTokens

PROMPT: Final = "Prompt"  # TokenParts that the first turns of a group share
SHARE_PROMPTS_ABOVE: Final = 128  # tokens; below, naming the parts costs as much as it saves


def turn_to_documents(turn: Turn) -> list[Encoded]:
    """The immutable documents of a turn: the model call, then its other calls."""
    return [call_to_documents(dispatch, turn_id=turn.model.id) for dispatch in (turn.model, *turn.tools)]


def call_to_documents(dispatch: DispatchedSamplingTask, *, turn_id: str) -> Encoded:
    """One request and its reply; `turn_id` is what it is found by."""
    document: Document = {
        "_id": dispatch.id,
        "schema_version": SCHEMA_VERSION,
        **place_to_fields(dispatch, turn_id=turn_id),
        "turn_id": turn_id,
        "kind": dispatch.kind.value,
        "target": codec.encode_json_value(dispatch.target),
        "status": str(dispatch.status),
        "started_at": dispatch.started_at,
        "finished_at": dispatch.finished_at,
    }
    if dispatch.error is not None:
        document["error"] = codec.encode_json_value(dispatch.error)
    if dispatch.cost_nano_usd:
        document["cost_nano_usd"] = dispatch.cost_nano_usd
    arrays: dict[str, codec.Array | bytes] = {}
    shared: tuple[Document, ...] = ()
    if dispatch.tokens is not None:
        tokens = dispatch.tokens
        document["tokens"] = {
            "parent_turn": tokens.parent_turn,
            "finish_reason": tokens.finish_reason,
            **spans_to_fields(tokens),
        }
        prompt_ids = np.array(tokens.prompt_ids, dtype=np.int32)
        if tokens.parent_turn < 0 and len(prompt_ids) > SHARE_PROMPTS_ABOVE:
            document["tokens"]["prompt"], shared = _shared_prompt(dispatch.task_id, prompt_ids)
        else:
            arrays["prompt_ids"] = prompt_ids
        arrays["completion_ids"] = np.array(tokens.completion_ids, dtype=np.int32)
        arrays["logprobs"] = np.array(tokens.logprobs, dtype=np.float32)
    for name, value in (("request", dispatch.request), ("response", dispatch.response)):
        if codec.json_value_bytes(value) > codec.PART_BYTES // 2:
            arrays[name] = json.dumps(value).encode("ascii")
        else:
            document[name] = codec.encode_json_value(value)
    encoded = with_payload(DISPATCH, document, arrays)
    return Encoded(document=encoded.document, parts=(*shared, *encoded.parts))


def _shared_prompt(task_id: str, prompt_ids: codec.Array) -> tuple[Document, tuple[Document, ...]]:
    """Where the prompt is, for the dispatch, and the TokenParts that hold it, the same for the whole group."""
    payload = codec.pack_apart("prompt_ids", prompt_ids)
    ids = codec.part_ids(PROMPT, f"{task_id}:{payload.header['sha256']}", payload.header)
    return payload.header, part_documents(ids, payload.parts)


def prompt_part_ids(document: Mapping[str, Any]) -> list[str]:
    """Ids of the TokenParts with the prompt of a dispatch; empty if it has its prompt itself."""
    header = document.get("tokens", {}).get("prompt")
    return [] if header is None else codec.part_ids(PROMPT, f"{document['task_id']}:{header['sha256']}", header)


def dispatch_from_document(document: Mapping[str, Any], *, parts: Sequence[bytes]) -> DispatchedSamplingTask:
    """One request and its reply. `parts`: those of its payload, then those of its prompt (parts.py)."""
    check_format(DISPATCH, document)
    num_own = document.get("payload", {}).get("num_parts", 0)
    arrays = codec.unpack(document["payload"], parts=parts[:num_own]) if "payload" in document else {}
    if "prompt" in document.get("tokens", {}):
        arrays |= codec.unpack(document["tokens"]["prompt"], parts=parts[num_own:])
    tokens = None
    if "tokens" in document:
        header = document["tokens"]
        tokens = TurnTokens(
            parent_turn=header["parent_turn"],
            prompt_ids=_as_tuple(arrays["prompt_ids"]),
            completion_ids=_as_tuple(arrays["completion_ids"]),
            logprobs=_as_tuple(arrays["logprobs"]),
            version_spans=spans_from_fields(header, num_tokens=len(arrays["completion_ids"])),
            finish_reason=header["finish_reason"],
        )
    mappings = {
        name: json.loads(bytes(arrays[name])) if name in arrays else codec.decode_json_value(document[name])
        for name in ("request", "response")
    }
    place = {**implied_place(document["_id"], turn_id=document["turn_id"]), **document}
    return DispatchedSamplingTask(
        id=document["_id"],
        record_id=place["record_id"],
        task_id=place["task_id"],
        turn=place["turn"],
        index=place["index"],
        kind=DispatchKind(document["kind"]),
        target=codec.decode_json_value(document["target"]),
        status=document["status"],
        request=mappings["request"],
        response=mappings["response"],
        started_at=document["started_at"],
        finished_at=document["finished_at"],
        tokens=tokens,
        error=codec.decode_json_value(document.get("error")),
        cost_nano_usd=document.get("cost_nano_usd", 0),
    )


def _as_tuple(array: codec.Array | bytes) -> tuple[Any, ...]:
    return () if isinstance(array, bytes) else tuple(array.tolist())
