"""Reading documents whose payload was cut into TokenParts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.store import codec
from agentrl.store.connection import Database
from agentrl.store.documents import Document
from agentrl.store.indexes import TOKEN_PART


async def load_parts(
    database: Database, *, collection: str, documents: Sequence[Document]
) -> Mapping[str, Sequence[bytes]]:
    """Parts of each document that has any, by document id and in order."""
    parts: dict[str, list[bytes]] = {}
    for document in documents:
        ids = codec.part_ids(collection, document["_id"], document.get("payload", {}))
        if not ids:
            continue
        found: dict[Any, bytes] = {}
        for part_id in ids:  # one at a time: together they may exceed the reply limit of a server
            part = await database.durable(TOKEN_PART).find_one({"_id": part_id})
            if part is not None:
                found[part_id] = part["bytes"]
        parts[document["_id"]] = [found[part_id] for part_id in ids if part_id in found]
    return parts
