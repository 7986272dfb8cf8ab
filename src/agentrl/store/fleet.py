"""Inference services, their quarantines, and workers, with times stamped by the server's clock.

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
from agentrl.store.indexes import ENGINE_QUARANTINE, SERVICE, WORKER
from agentrl.store.ledger_documents import (
    engine_quarantine_from_document,
    engine_quarantine_to_document,
    service_from_document,
    service_to_document,
    worker_from_document,
    worker_to_document,
)
from agentrl.types import EngineQuarantine, InferenceService, Worker

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

    async def raise_quarantine(self, quarantine: EngineQuarantine) -> None:
        """See FleetStore.raise_engine_quarantine. The server stamps the very write: whoever reads later sees it."""
        document = engine_quarantine_to_document(quarantine)
        collection = self._database.durable(ENGINE_QUARANTINE)
        query = {"_id": document.pop("_id")}
        update = {"$set": document, "$currentDate": {"raised_at": True}}

        async def write() -> None:
            if await collection.find_one(query) is None:
                await collection.update_one(query, update, upsert=True)

        await self._database.run(f"quarantine {quarantine.service_id}", write)

    async def lift_quarantine(self, quarantine_id: str, *, until_s: float) -> None:
        """See FleetStore.lift_engine_quarantine."""
        collection = self._database.durable(ENGINE_QUARANTINE)
        update = {"$set": {"until_s": until_s}}
        await self._database.run("lift a quarantine", lambda: collection.update_one({"_id": quarantine_id}, update))

    async def list_quarantines(self) -> list[EngineQuarantine]:
        """See FleetStore.list_engine_quarantines."""
        return [engine_quarantine_from_document(document) for document in await self._all(ENGINE_QUARANTINE)]

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
