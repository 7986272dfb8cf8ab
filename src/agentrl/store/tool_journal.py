"""ToolJournal: results of tool calls, each committed before it is used.

    ToolJournal {_id: "<record>/<turn>/<index>/<content hash>", content_hash, server, tool, arguments, status, error,
                 content}                                                            inserted once, never changed
    ToolJournal {_id: "<content hash>", called_at, ...}                     the result that equal calls reuse (cache)

`_id` is the idempotency key of one call of one Record, whatever attempt or claim makes it. `content_hash` is that of
server, tool and arguments alone, so that a call of any Record can be found by what it asked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from agentrl.errors import StoreError
from agentrl.store import codec
from agentrl.store.connection import Database
from agentrl.store.documents import Document, Encoded, check_format, with_payload
from agentrl.store.indexes import TOKEN_PART, TOOL_JOURNAL
from agentrl.store.parts import load_parts
from agentrl.types import SCHEMA_VERSION, ToolCall, ToolResult, ToolStatus


class ToolCallJournal:
    """agentrl.protocols.ToolJournal on MongoDB."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def find_result(self, call: ToolCall) -> ToolResult | None:
        """See ToolJournal.find_result."""
        return await self._database.run("look into the tool journal", lambda: self._find(call.key))

    async def put_result(self, call: ToolCall, result: ToolResult) -> ToolResult:
        """See ToolJournal.put_result."""
        encoded = _call_to_document(call, result, key=call.key)
        return await self._database.run("write the tool journal", lambda: self._insert(encoded, result))

    async def find_equal(self, call: ToolCall, *, max_age_s: float) -> ToolResult | None:
        """See ToolJournal.find_equal."""
        return await self._database.run("look into the tool cache", lambda: self._find_equal(call, max_age_s=max_age_s))

    async def put_equal(self, call: ToolCall, result: ToolResult, *, max_age_s: float) -> ToolResult:
        """See ToolJournal.put_equal."""
        encoded = _call_to_document(call, result, key=call.content_hash)
        encoded.document["called_at"] = await self._database.stamp(None)
        return await self._database.run(
            "write the tool cache", lambda: self._put_equal(call, encoded, result, max_age_s=max_age_s)
        )

    async def _find_equal(self, call: ToolCall, *, max_age_s: float) -> ToolResult | None:
        since = await self._database.clock.now() - timedelta(seconds=max_age_s)
        return await self._find(call.content_hash, since=since)

    async def _put_equal(self, call: ToolCall, encoded: Encoded, result: ToolResult, *, max_age_s: float) -> ToolResult:
        cache = self._database.durable(TOOL_JOURNAL)
        for part in encoded.parts:
            await self._database.insert_new(self._database.durable(TOKEN_PART), [part])
        while await self._database.insert_new(cache, [encoded.document]):
            if (known := await self._find_equal(call, max_age_s=max_age_s)) is not None:
                return known
            old = await cache.find_one({"_id": call.content_hash}, {"called_at": 1})
            query = {"_id": call.content_hash, "called_at": None if old is None else old["called_at"]}
            if (await cache.replace_one(query, encoded.document)).modified_count:
                break  # else another process was faster: use what it wrote
        return result

    async def _find(self, key: str, *, since: datetime | None = None) -> ToolResult | None:
        document = await self._database.durable(TOOL_JOURNAL).find_one({"_id": key})
        if document is None or (since is not None and document["called_at"] < since):
            return None
        parts = await load_parts(self._database, collection=TOOL_JOURNAL, documents=[document])
        return _result_from_document(document, parts=parts.get(key, ()))

    async def _insert(self, encoded: Encoded, result: ToolResult) -> ToolResult:
        for part in encoded.parts:
            await self._database.insert_new(self._database.durable(TOKEN_PART), [part])
        if not await self._database.insert_new(self._database.durable(TOOL_JOURNAL), [encoded.document]):
            return result
        first = await self._find(encoded.document["_id"])
        if first is None:
            raise StoreError(f"tool journal {encoded.document['_id']}: the entry was there, and is gone")
        return first


def _call_to_document(call: ToolCall, result: ToolResult, *, key: str) -> Encoded:
    document: Document = {
        "_id": key,
        "schema_version": SCHEMA_VERSION,
        "content_hash": call.content_hash,
        "record_id": call.record_id,
        "turn": call.turn,
        "index": call.index,
        "server": call.server,
        "tool": call.tool,
        "status": result.status.value,
        "error": codec.encode_json_value(result.error),
    }
    arrays: dict[str, codec.Array | bytes] = {}
    for name, value in (("arguments", call.arguments), ("content", result.content)):
        if codec.json_value_bytes(value) > codec.COMPRESS_ABOVE_BYTES:
            arrays[name] = json.dumps(value).encode("ascii")
        else:
            document[name] = codec.encode_json_value(value)
    # A call may have been executed twice and have answered differently: the parts of the two must not mix.
    return with_payload(TOOL_JOURNAL, document, arrays, are_parts_named_by_content=True)


def _result_from_document(document: Mapping[str, Any], *, parts: Sequence[bytes]) -> ToolResult:
    check_format(TOOL_JOURNAL, document)
    arrays = codec.unpack(document["payload"], parts=parts) if "payload" in document else {}
    content = (
        json.loads(bytes(arrays["content"])) if "content" in arrays else codec.decode_json_value(document["content"])
    )
    return ToolResult(
        status=ToolStatus(document["status"]), content=content, error=codec.decode_json_value(document["error"])
    )
