"""Inference services and workers, with heartbeats stamped by the server's clock.

A process that starts again is a new one, with an id of its own (host, process, port), which Records and calls name. So
that the lists do not grow with every restart, a newcomer removes entries that have been silent for an hour, all but the
last ones: those, and the ids in the facts, tell who took part.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Final

from agentrl.store.connection import Database
from agentrl.store.documents import Document
from agentrl.store.indexes import SERVICE, WORKER
from agentrl.store.ledger_documents import (
    service_from_document,
    service_to_document,
    worker_from_document,
    worker_to_document,
)
from agentrl.types import InferenceService, Worker

SILENT_AFTER: Final = timedelta(hours=1)
KEPT_SILENT: Final = 32


class Fleet:
    """Who is there."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._registered: set[str] = set()  # by this process

    async def put_service(self, service: InferenceService) -> None:
        """See FleetStore.put_service."""
        await self._put(SERVICE, service_to_document(service))

    async def put_worker(self, worker: Worker) -> None:
        """See FleetStore.put_worker."""
        await self._put(WORKER, worker_to_document(worker))

    async def _put(self, name: str, document: Document) -> None:
        fields = {key: value for key, value in document.items() if key != "_id"}
        update = {"$set": fields, "$currentDate": {"heartbeat_at": True}}
        collection = self._database.relaxed(name)  # repeated every few seconds
        query = {"_id": document["_id"]}
        await self._database.run(f"register {query}", lambda: collection.update_one(query, update, upsert=True))
        if document["_id"] not in self._registered:
            self._registered.add(document["_id"])
            await self._forget_silent(name)

    async def _forget_silent(self, name: str) -> None:
        """Remove the entries that are silent for long, but for the last of them."""
        before = await self._database.run("read the clock", self._database.clock.now) - SILENT_AFTER
        silent = {"heartbeat_at": {"$lt": before}}
        collection = self._database.durable(name)
        find = partial(collection.find, silent, {"heartbeat_at": 1})
        found = await self._database.run(f"list silent {name}", lambda: find().to_list())
        found.sort(key=lambda document: document["heartbeat_at"])
        if gone := [document["_id"] for document in found[:-KEPT_SILENT]]:
            query = {"_id": {"$in": gone}, **silent}  # one that comes back meanwhile stays
            await self._database.run(f"remove silent {name}", lambda: collection.delete_many(query))

    async def list_services(self) -> list[InferenceService]:
        """See FleetStore.list_services."""
        return [service_from_document(document) for document in await self._all(SERVICE)]

    async def list_workers(self) -> list[Worker]:
        """See FleetStore.list_workers."""
        return [worker_from_document(document) for document in await self._all(WORKER)]

    async def _all(self, name: str) -> list[Document]:
        collection = self._database.durable(name)
        found = await self._database.run(f"list {name}", lambda: collection.find({}).to_list())
        return sorted(found, key=lambda document: str(document["_id"]))
