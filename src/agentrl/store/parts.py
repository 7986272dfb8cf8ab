"""TokenParts: what a document's payload was cut into, and prompts that a whole group shares. Named by what they hold.

DispatchedSamplingTask:<dispatch>#<i>, DBRecordData:<row>#<i>     pieces of one document's payload
Prompt:<task>:<sha256>#<i>                                        token ids that several first turns begin with
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from agentrl.store import codec
from agentrl.store.connection import Database
from agentrl.store.dispatch_documents import prompt_part_ids
from agentrl.store.documents import Document
from agentrl.store.indexes import TOKEN_PART

_READ_BYTES: Final = 16 * 1024 * 1024  # a reply is limited to 48 MB


def all_part_ids(collection: str, document: Mapping[str, Any]) -> list[str]:
    """Ids of every TokenPart a document needs: its payload's, then its prompt's."""
    return [*codec.part_ids(collection, document["_id"], document.get("payload", {})), *prompt_part_ids(document)]


async def load_parts(
    database: Database, *, collection: str, documents: Sequence[Document]
) -> Mapping[str, Sequence[bytes]]:
    """Parts of each document that has any, by document id, in the order of `all_part_ids`."""
    ids = {document["_id"]: all_part_ids(collection, document) for document in documents}
    sizes: dict[str, int] = {}
    for document in documents:
        sizes.update(dict.fromkeys(ids[document["_id"]], codec.PART_BYTES))
        sizes.update(_prompt_sizes(document))
    found: dict[str, bytes] = {}
    for chunk in _chunks(sizes):
        async for part in database.durable(TOKEN_PART).find({"_id": {"$in": chunk}}):
            found[part["_id"]] = part["bytes"]
    return {
        document_id: [found[part_id] for part_id in part_ids if part_id in found]
        for document_id, part_ids in ids.items()
        if part_ids
    }


def _prompt_sizes(document: Mapping[str, Any]) -> dict[str, int]:
    ids = prompt_part_ids(document)
    return dict.fromkeys(ids, min(codec.PART_BYTES, document["tokens"]["prompt"]["num_bytes"])) if ids else {}


def _chunks(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Ids in lists of at most 16 MiB."""
    chunk: list[str] = []
    total = 0
    for part_id, size in sizes.items():
        if chunk and total + size > _READ_BYTES:
            yield chunk
            chunk, total = [], 0
        chunk.append(part_id)
        total += size
    if chunk:
        yield chunk
