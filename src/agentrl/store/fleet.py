"""Inference services and workers, with heartbeats stamped by the server's clock."""

from __future__ import annotations

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


class Fleet:
    """Who is there."""

    def __init__(self, database: Database) -> None:
        self._database = database

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
