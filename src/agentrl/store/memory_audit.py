"""The audit's view of a MemoryStore. Apart from memory.py, which is long enough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from agentrl.protocols import QuarantinedWork, TaskState
from agentrl.types import (
    DBRecordData,
    DispatchedSamplingTask,
    PolicyVersion,
    Record,
    Turn,
)

if TYPE_CHECKING:
    from agentrl.store.memory import _TaskState
    from agentrl.store.memory_recovery import Quarantined


class MemoryAuditReads:
    """agentrl.protocols.AuditStore over the dictionaries of MemoryStore, apart from the ledger and the clock."""

    _tasks: dict[str, _TaskState]
    _records: dict[str, Record]
    _turns: dict[str, Turn]
    _sequences: dict[str, DBRecordData]
    _policies: dict[int, PolicyVersion]
    quarantined: dict[str, Quarantined]

    async def list_task_ids(self) -> list[str]:
        """See AuditStore.list_task_ids."""
        return sorted(self._tasks)

    async def list_record_ids(self) -> list[str]:
        """See AuditStore.list_record_ids."""
        return sorted(self._records)

    async def find_tasks(self, ids: Sequence[str]) -> list[TaskState]:
        """See AuditStore.find_tasks."""
        states = [self._tasks[task_id] for task_id in ids if task_id in self._tasks]
        return [
            TaskState(
                task=state.task,
                status=state.status,
                fence=state.fence,
                lease_until=state.lease_until,
                settlement=state.settlement,
                sequences=state.sequences,
                consumed_step=state.consumed_step,
                drop_reason=state.drop_reason,
                settled_at=state.settled_at,
            )
            for state in states
        ]

    async def find_records(self, ids: Sequence[str]) -> list[Record]:
        """See AuditStore.find_records."""
        return [self._records[record_id] for record_id in ids if record_id in self._records]

    async def find_dispatches(self, turn_ids: Sequence[str]) -> dict[str, list[DispatchedSamplingTask]]:
        """See AuditStore.find_dispatches."""
        turns = {turn_id: self._turns[turn_id] for turn_id in turn_ids if turn_id in self._turns}
        return {turn_id: [turn.model, *turn.tools] for turn_id, turn in turns.items()}

    async def find_sequences(self, ids: Sequence[str]) -> list[DBRecordData]:
        """See AuditStore.find_sequences."""
        return [self._sequences[row_id] for row_id in ids if row_id in self._sequences]

    async def list_policies(self) -> list[PolicyVersion]:
        """See AuditStore.list_policies."""
        return [self._policies[version] for version in sorted(self._policies)]

    async def list_quarantined(self) -> list[QuarantinedWork]:
        """See AuditStore.list_quarantined."""
        return [
            QuarantinedWork(key=key, reason=work.reason, ids=tuple(work.ids))
            for key, work in sorted(self.quarantined.items())
        ]
