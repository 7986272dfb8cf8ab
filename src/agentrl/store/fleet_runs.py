"""The runs of a fleet: the collection `FleetRun` in a database of the fleet's own. A few documents, read whole.

    {_id: "run_a", share: 2, priority: 0, budget_tasks: null, budget_tokens: null, status: "active", reason: "",
     config: {...}, offset: 12.5, usage: {"3f1c...": {num_tasks: 40, num_tokens: 8123, virtual_time: 20.0}, ...}}

Users may edit everything but `offset` and `usage`. Every write sets absolute values that have one writer, or a maximum,
so that repeating one after a lost reply changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from agentrl.errors import UnavailableError
from agentrl.fleets import FleetRun, FleetRunStatus, FleetUsage
from agentrl.store import codec
from agentrl.store.connection import Database
from agentrl.store.documents import Document
from agentrl.store.indexes import TASK
from agentrl.types import SCHEMA_VERSION

FLEET_RUN: Final = "FleetRun"


class MongoFleetRuns:
    """agentrl.fleets.FleetRunStore on MongoDB or the embedded server."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def prepare(self) -> None:
        """Connect. Raises UnavailableError if no database answers, or if a run has this name."""
        await self._database.connect()
        if TASK in await self._database.run("list collections", self._database.list_collections):
            name = self._database.name
            raise UnavailableError(f"fleet_name = {name}: this is the database of a run; choose another name")

    def outlast_outages(self, stop: asyncio.Event) -> None:
        """From now on, wait for a server that is away as long as it takes, or until `stop` is set."""
        self._database.outlast_outages(stop)

    async def put_fleet_run(self, run: FleetRun) -> None:
        """See FleetRunStore.put_fleet_run."""
        update = {"$set": _decided_fields(run)}
        runs = self._database.durable(FLEET_RUN)
        await self._database.run("write a fleet run", lambda: runs.update_one({"_id": run.name}, update, upsert=True))

    async def list_fleet_runs(self) -> list[FleetRun]:
        """See FleetRunStore.list_fleet_runs."""
        runs = self._database.durable(FLEET_RUN)
        found = await self._database.run("list the fleet's runs", lambda: runs.find({}).to_list())
        return sorted((fleet_run_from_document(document) for document in found), key=lambda run: run.name)

    async def put_fleet_usage(self, run_name: str, *, member: str, usage: FleetUsage) -> None:
        """See FleetRunStore.put_fleet_usage."""
        fields = {
            "num_tasks": usage.num_tasks,
            "num_tokens": usage.num_tokens,
            "virtual_time": usage.virtual_time,
        }
        await self._update("charge a fleet run", {"_id": run_name}, {"$set": {f"usage.{member}": fields}})

    async def raise_fleet_offset(self, run_name: str, *, offset: float) -> None:
        """See FleetRunStore.raise_fleet_offset."""
        await self._update("schedule a fleet run", {"_id": run_name}, {"$max": {"offset": offset}})

    async def move_fleet_run(
        self, run_name: str, *, source: FleetRunStatus, target: FleetRunStatus, reason: str
    ) -> None:
        """See FleetRunStore.move_fleet_run."""
        query = {"_id": run_name, "status": source.value}
        await self._update("move a fleet run", query, {"$set": {"status": target.value, "reason": reason}})

    async def close(self) -> None:
        """See FleetRunStore.close."""
        await self._database.close()

    async def _update(self, what: str, query: Document, update: Document) -> None:
        runs = self._database.durable(FLEET_RUN)
        await self._database.run(what, lambda: runs.update_one(query, update))


def open_fleet_runs(uri: str, *, fleet_name: str, timeout_s: float = 20.0) -> MongoFleetRuns:
    """The fleet's store; call `prepare()` before anything else."""
    return MongoFleetRuns(Database(uri, name=fleet_name, timeout_s=timeout_s))


def _decided_fields(run: FleetRun) -> Document:
    return {
        "schema_version": SCHEMA_VERSION,
        "share": run.share,
        "priority": run.priority,
        "budget_tasks": run.budget_tasks,
        "budget_tokens": run.budget_tokens,
        "status": run.status.value,
        "reason": run.reason,
        "config": codec.encode_json_value(run.config),
    }


def fleet_run_from_document(document: Mapping[str, Any]) -> FleetRun:
    """A run of a fleet. What a user wrote and cannot be used makes it paused, and the reason says why."""
    usage = {member: FleetUsage(**fields) for member, fields in (document.get("usage") or {}).items()}
    offset = document.get("offset")
    name, config = document["_id"], codec.decode_json_value(document.get("config") or {})
    try:
        return FleetRun(
            name=name,
            share=_number(document, "share", default=1.0, above=0.0),
            priority=int(_number(document, "priority", default=0)),
            budget_tasks=_budget(document, "budget_tasks"),
            budget_tokens=_budget(document, "budget_tokens"),
            status=FleetRunStatus(document.get("status", FleetRunStatus.ACTIVE.value)),
            reason=str(document.get("reason") or ""),
            config=config,
            offset=offset,
            usage=usage,
        )
    except ValueError as error:
        return FleetRun(
            name=name, status=FleetRunStatus.PAUSED, reason=str(error), config=config, offset=offset, usage=usage
        )


def _number(document: Mapping[str, Any], key: str, *, default: float, above: float = float("-inf")) -> float:
    value = document.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < float("inf"):
        raise ValueError(f"{key} = {value!r} is no number{f' above {above:g}' if above == 0 else ''}; correct it")
    return value


def _budget(document: Mapping[str, Any], key: str) -> int | None:
    return None if document.get(key) is None else int(_number(document, key, default=0))
