"""What a run spends: one account that every process of it draws on, and the sums of what its calls did cost.

    Account {_id: "run", total, open: ["<reservation>:<amount>", ...]}      total = spent + reserved, in nano-dollars

    before a call    total <= limit - amount, reservation not open  ->  total + amount, reservation open
    after it         reservation open                               ->  total + cost - amount, reservation closed

One document and one compare-and-set per step, so that no two processes can take the same last dollar. Ids make both
steps safe to repeat. A process that is killed between them leaves its reservation open: the call may have been billed.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Final

from agentrl.errors import StoreError
from agentrl.protocols import CallCosts
from agentrl.store import codec
from agentrl.store.connection import Database
from agentrl.store.documents import Document, check_format
from agentrl.store.indexes import ACCOUNT, DISPATCH
from agentrl.types import SCHEMA_VERSION, DispatchKind

_ID: Final = "run"
_CALL_FIELDS: Final = {"kind": 1, "target": 1, "started_at": 1, "finished_at": 1, "cost_nano_usd": 1}


class Account:
    """agentrl.protocols.SpendingAccount on MongoDB."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._is_open = False

    async def reserve(self, reservation: str, *, amount: int, limit: int | None) -> bool:
        """See SpendingAccount.reserve."""
        await self._open()
        entry = _entry(reservation, amount)
        query: Document = {"_id": _ID, "open": {"$ne": entry}}
        if limit is not None:
            query["total"] = {"$lte": limit - amount}
        update = {"$inc": {"total": amount}, "$push": {"open": entry}}
        accounts = self._database.durable(ACCOUNT)

        async def take() -> bool:
            if (await accounts.update_one(query, update)).modified_count:
                return True
            return entry in (await self._read())["open"]  # the reply to an earlier try was lost

        return await self._database.run("reserve money", take)

    async def settle(self, reservation: str, *, amount: int) -> None:
        """See SpendingAccount.settle."""
        accounts = self._database.durable(ACCOUNT)

        async def close() -> None:
            found = [entry for entry in (await self._read())["open"] if entry.startswith(f"{reservation}:")]
            for entry in found:
                reserved = int(entry.rpartition(":")[2])
                update = {"$inc": {"total": amount - reserved}, "$pull": {"open": entry}}
                await accounts.update_one({"_id": _ID, "open": entry}, update)

        await self._database.run("settle money", close)

    async def spent(self) -> int:
        """See SpendingAccount.spent."""
        document = await self._database.run("read the account", self._read)
        return int(document["total"])

    async def sum_calls(self) -> list[CallCosts]:
        """See ReadStore.sum_calls. Reads a few fields of every call: for people, not for loops."""
        calls = self._database.durable(DISPATCH)
        found = await self._database.run("add up calls", lambda: calls.find({}, _CALL_FIELDS).to_list())
        return add_up(
            CallCosts(
                kind=DispatchKind(call["kind"]),
                target=codec.decode_json_value(call["target"]),
                num_calls=1,
                seconds=(call["finished_at"] - call["started_at"]) / timedelta(seconds=1),
                cost_nano_usd=call.get("cost_nano_usd", 0),
            )
            for call in found
        )

    async def _open(self) -> None:
        """Create the account unless it is there."""
        if self._is_open:
            return
        document = {"_id": _ID, "schema_version": SCHEMA_VERSION, "total": 0, "open": []}
        accounts = self._database.durable(ACCOUNT)
        await self._database.run("open the account", lambda: self._database.insert_new(accounts, [document]))
        self._is_open = True

    async def _read(self) -> dict[str, Any]:
        document = await self._database.durable(ACCOUNT).find_one({"_id": _ID})
        if document is None:
            if self._is_open:
                raise StoreError(f"the account of run {self._database.name} was there, and is gone")
            return {"total": 0, "open": []}
        check_format(ACCOUNT, document)
        return document


def add_up(calls: Iterable[CallCosts]) -> list[CallCosts]:
    """One entry per kind and target, the dearest first."""
    sums: dict[tuple[DispatchKind, str], CallCosts] = {}
    for call in calls:
        key = (call.kind, call.target)
        known = sums.get(key)
        sums[key] = CallCosts(
            kind=call.kind,
            target=call.target,
            num_calls=call.num_calls + (known.num_calls if known else 0),
            seconds=call.seconds + (known.seconds if known else 0.0),
            cost_nano_usd=call.cost_nano_usd + (known.cost_nano_usd if known else 0),
        )
    return sorted(sums.values(), key=lambda entry: (-entry.cost_nano_usd, entry.kind, entry.target))


def _entry(reservation: str, amount: int) -> str:
    return f"{reservation}:{amount}"
