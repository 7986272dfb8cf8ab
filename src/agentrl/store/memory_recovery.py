"""Starting Records over, the tool journal and the account in a MemoryStore. Apart from memory.py, long enough."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from agentrl.store.attempts import attempt_key, failure_reason, has_begun, next_attempt
from agentrl.types import Record, RecordStatus, ToolCall, ToolResult


@dataclass(slots=True)
class Quarantined:
    """Work that is kept but never used."""

    what: str
    reason: str
    ids: list[str] = field(default_factory=list)


class MemoryRecovery:
    """What a sampler needs to go on with the work of one that died."""

    _records: dict[str, Record]
    _tool_results: dict[str, ToolResult]
    _equal_calls: dict[str, tuple[datetime, ToolResult]]
    _spent: int
    _reserved: dict[str, int]
    _clock: Callable[[], datetime]
    quarantined: dict[str, Quarantined]

    async def reopen_record(self, record: Record) -> Record:
        """See TaskStore.reopen_record."""
        header = self._records[record.id]
        return self._start_over(record, given_up=RecordStatus.FAILED, reason=failure_reason(header))

    async def restart_record(self, record: Record, *, reason: str) -> Record:
        """See TaskStore.restart_record."""
        return self._start_over(record, given_up=RecordStatus.RUNNING, reason=reason)

    def _start_over(self, record: Record, *, given_up: RecordStatus, reason: str) -> Record:
        header = self._records[record.id]
        if not has_begun(record, header=header, given_up=given_up):
            key = attempt_key(header)
            self.quarantined[key] = Quarantined(what=key, reason=reason, ids=list(header.turn_ids))
            self._records[record.id] = header = next_attempt(header)
        return header

    async def find_result(self, call: ToolCall) -> ToolResult | None:
        """See ToolJournal.find_result."""
        return self._tool_results.get(call.key)

    async def put_result(self, call: ToolCall, result: ToolResult) -> ToolResult:
        """See ToolJournal.put_result."""
        return self._tool_results.setdefault(call.key, result)

    async def find_equal(self, call: ToolCall, *, max_age_s: float) -> ToolResult | None:
        """See ToolJournal.find_equal."""
        called_at, result = self._equal_calls.get(call.content_hash, (None, None))
        is_young = called_at is not None and called_at >= self._clock() - timedelta(seconds=max_age_s)
        return result if is_young else None

    async def put_equal(self, call: ToolCall, result: ToolResult, *, max_age_s: float) -> ToolResult:
        """See ToolJournal.put_equal."""
        known = await self.find_equal(call, max_age_s=max_age_s)
        if known is None:
            self._equal_calls[call.content_hash] = (self._clock(), result)
        return known or result

    async def reserve(self, reservation: str, *, amount: int, limit: int | None) -> bool:
        """See SpendingAccount.reserve."""
        if reservation in self._reserved:
            return True
        if limit is not None and self._spent + amount > limit:
            return False
        self._reserved[reservation] = amount
        self._spent += amount
        return True

    async def settle(self, reservation: str, *, amount: int) -> None:
        """See SpendingAccount.settle."""
        if reservation in self._reserved:
            self._spent += amount - self._reserved.pop(reservation)

    async def spent(self) -> int:
        """See SpendingAccount.spent."""
        return self._spent
