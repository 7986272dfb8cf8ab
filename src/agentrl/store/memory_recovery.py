"""Starting Records over, and the tool journal, in a MemoryStore. Apart from memory.py, which is long enough."""

from __future__ import annotations

from dataclasses import dataclass, field

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
