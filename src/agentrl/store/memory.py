"""MemoryStore: the Store inside one process, for unit tests. Same contract as MongoStore, no durability."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from agentrl.algo.trie import summarise_group
from agentrl.errors import StaleClaimError, StoreError
from agentrl.protocols import CallCosts, TaskLook
from agentrl.store.account import add_up
from agentrl.store.claims import at_epoch
from agentrl.store.memory_audit import MemoryAuditReads
from agentrl.store.memory_fleet import MemoryFleet
from agentrl.store.memory_recovery import MemoryRecovery, Quarantined
from agentrl.store.memory_scores import MemoryScores
from agentrl.store.turns import extend_record
from agentrl.types import (
    DBRecordData,
    DispatchedSamplingTask,
    GroupSettlement,
    PolicyVersion,
    Record,
    RecordStatus,
    SequenceSummary,
    SettledGroup,
    StepStatus,
    Task,
    TaskClaim,
    TaskStatus,
    ToolResult,
    TrainStep,
    Turn,
)


@dataclass(slots=True)
class _TaskState:
    task: Task
    status: TaskStatus = TaskStatus.PENDING
    owner: str | None = None
    lease_until: datetime | None = None
    fence: int = 0
    settlement: GroupSettlement | None = None
    sequences: tuple[SequenceSummary, ...] = ()
    settled_at: datetime | None = None
    mean_tool_calls: float = 0.0
    consumed_step: int | None = None
    drop_reason: str | None = None

    def is_held_by(self, claim: TaskClaim) -> bool:
        return self.status is TaskStatus.RUNNING and (self.owner, self.fence) == (claim.owner, claim.fence)

    def give_back(self) -> None:
        self.status, self.owner, self.lease_until = TaskStatus.PENDING, None, None


class MemoryStore(MemoryRecovery, MemoryAuditReads, MemoryFleet, MemoryScores):
    """agentrl.protocols.Store in dictionaries. Methods never suspend, so each is atomic. `clock` is server time."""

    def __init__(self, *, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        super().__init__(clock=clock)
        MemoryScores.__init__(self)
        self._tasks: dict[str, _TaskState] = {}
        self._records: dict[str, Record] = {}
        self._dispatches: dict[str, DispatchedSamplingTask] = {}
        self._turns: dict[str, Turn] = {}
        self._sequences: dict[str, DBRecordData] = {}
        self._steps: dict[int, TrainStep] = {}
        self._policies: dict[int, PolicyVersion] = {}
        self._run: dict[str, Any] = {}
        self._tool_results: dict[str, ToolResult] = {}
        self._equal_calls: dict[str, tuple[datetime, ToolResult]] = {}
        self._spent = 0
        self._reserved: dict[str, int] = {}
        self.quarantined: dict[str, Quarantined] = {}

    async def prepare(self) -> None:
        """Nothing to do."""

    async def close(self) -> None:
        """Nothing to do."""

    # --- TaskStore ----------------------------------------------------------------------------------------------

    async def insert_tasks(self, tasks: Sequence[Task]) -> int:
        """See TaskStore.insert_tasks."""
        new = {task.id: _TaskState(task=task) for task in tasks if task.id not in self._tasks}
        self._tasks |= new
        return len(new)

    async def enqueue_epoch(self, *, split: str, epoch: int) -> int | None:
        """See TaskStore.enqueue_epoch."""
        first = [state.task for state in self._tasks.values() if (state.task.split, state.task.epoch) == (split, 0)]
        return await self.insert_tasks([at_epoch(task, epoch) for task in first]) if first else None

    async def claim_tasks(self, *, split: str, owner: str, lease_s: float, limit: int) -> list[TaskClaim]:
        """See TaskStore.claim_tasks."""
        token = f"{owner}:{uuid.uuid4().hex}"
        waiting = self._in_status(split, TaskStatus.PENDING)
        pending = sorted(waiting, key=lambda state: (state.fence == 0, state.task.epoch))  # given back first
        claims = []
        for state in pending[:limit]:
            state.status, state.owner = TaskStatus.RUNNING, token
            state.lease_until = self._clock() + timedelta(seconds=lease_s)
            state.fence += 1
            claims.append(TaskClaim(task=state.task, owner=token, fence=state.fence, lease_until=state.lease_until))
        return claims

    async def renew_claims(self, claims: Sequence[TaskClaim], *, lease_s: float) -> list[str]:
        """See TaskStore.renew_claims."""
        lost = []
        for claim in claims:
            state = self._tasks[claim.task.id]
            if state.is_held_by(claim):
                state.lease_until = self._clock() + timedelta(seconds=lease_s)
            else:
                lost.append(claim.task.id)
        return lost

    async def release_claim(self, claim: TaskClaim) -> None:
        """See TaskStore.release_claim."""
        state = self._tasks[claim.task.id]
        if state.is_held_by(claim):
            state.give_back()

    async def reap_expired_claims(self, *, split: str) -> list[str]:
        """See TaskStore.reap_expired_claims."""
        now = self._clock()
        running = self._in_status(split, TaskStatus.RUNNING)
        expired = [state for state in running if state.lease_until is not None and state.lease_until < now]
        for state in expired:
            state.give_back()
        return [state.task.id for state in expired]

    async def open_records(self, claim: TaskClaim) -> list[Record]:
        """See TaskStore.open_records."""
        if not self._tasks[claim.task.id].is_held_by(claim):
            raise StaleClaimError(f"task {claim.task.id}: the claim with fence {claim.fence} is lost")
        return [self._open_record(claim, generation) for generation in range(claim.task.num_generations)]

    def _open_record(self, claim: TaskClaim, generation: int) -> Record:
        record_id = f"{claim.task.id}/g{generation}"
        record = self._records.get(record_id)
        if record is None:
            record = Record(
                id=record_id,
                task_id=claim.task.id,
                split=claim.task.split,
                generation=generation,
                fence=claim.fence,
                status=RecordStatus.RUNNING,
                started_at=self._clock(),
            )
        elif record.status is not RecordStatus.FINISHED:
            record = replace(record, fence=claim.fence)
        self._records[record_id] = record
        return record

    async def load_turns(self, record: Record) -> list[Turn]:
        """See TaskStore.load_turns."""
        missing = [turn_id for turn_id in record.turn_ids if turn_id not in self._turns]
        if missing:
            raise StoreError(f"turn {missing[0]} is committed but its model call is not in the store")
        return [self._turns[turn_id] for turn_id in record.turn_ids]

    async def commit_turn(self, record: Record, turn: Turn) -> Record:
        """See TaskStore.commit_turn."""
        extended = extend_record(record, turn)
        if self._turns.setdefault(turn.model.id, turn) != turn:
            raise StoreError(f"turn {turn.model.id}: other content was written before at fence {record.fence}")
        header = self._records[record.id]
        if turn.model.id in header.turn_ids:
            return extended
        if header.fence != record.fence:
            ids = [turn.model.id, *(tool.id for tool in turn.tools)]
            raise self._refusal(f"turn {turn.model.id}", fence=record.fence, ids=ids)
        if header.attempt != record.attempt:
            raise StoreError(f"turn {turn.model.id}: {record.id} is at attempt {header.attempt}")
        if header.is_final or len(header.turn_ids) != len(record.turn_ids):
            raise StoreError(
                f"turn {turn.model.id}: {record.id} has {len(header.turn_ids)} turns and is {header.status}"
            )
        self._records[record.id] = replace(extended, started_at=header.started_at)
        return extended

    async def finish_record(self, record: Record) -> None:
        """See TaskStore.finish_record."""
        if not record.is_final or record.stop_reason is None:
            raise ValueError(f"record {record.id} is {record.status} with stop_reason {record.stop_reason}: not final")
        header = self._records[record.id]
        if header.fence != record.fence:
            raise self._refusal(f"result of {record.id}", fence=record.fence, ids=[record.id])
        if header.attempt != record.attempt:
            raise StoreError(f"result of {record.id}, attempt {record.attempt}: it is at attempt {header.attempt}")
        final = replace(
            header,
            status=record.status,
            stop_reason=record.stop_reason,
            answer=record.answer,
            score=record.score,
            scorer=record.scorer,
            turn_scores=record.turn_scores,
            episodes=record.episodes,
            error=record.error,
            worker=record.worker,
            finished_at=record.finished_at or header.finished_at or self._clock(),
        )
        if header.is_final and replace(final, finished_at=header.finished_at) != header:
            raise StoreError(f"result of {record.id}: another one was written before at fence {record.fence}")
        self._records[record.id] = header if header.is_final else final

    async def settle_task(
        self, claim: TaskClaim, settlement: GroupSettlement, sequences: Sequence[DBRecordData]
    ) -> None:
        """See TaskStore.settle_task."""
        state = self._tasks[claim.task.id]
        if (state.owner, state.fence) != (claim.owner, claim.fence):
            ids = [sequence.id for sequence in sequences]
            raise self._refusal(f"settlement of {claim.task.id}", fence=claim.fence, ids=ids)
        if state.status is not TaskStatus.RUNNING:
            return
        await self.insert_sequences(sequences)
        records = [record for record in self._records.values() if record.task_id == claim.task.id]
        state.status, state.lease_until = TaskStatus.SETTLED, None
        state.settlement, state.settled_at = settlement, self._clock()
        state.sequences = summarise_group(sequences)
        state.mean_tool_calls = sum(record.num_tool_calls for record in records) / len(records) if records else 0.0

    async def count_tasks(self, *, split: str) -> dict[TaskStatus, int]:
        """See TaskStore.count_tasks."""
        counted = (TaskStatus.PENDING, TaskStatus.RUNNING, TaskStatus.SETTLED)
        return {status: len(self._in_status(split, status)) for status in counted}

    async def look_over_tasks(self, *, split: str) -> TaskLook:
        """See TaskStore.look_over_tasks."""
        reaped = await self.reap_expired_claims(split=split)
        return TaskLook(reaped=tuple(reaped), counts=await self.count_tasks(split=split))

    async def latest_policy(self) -> PolicyVersion | None:
        """See TaskStore.latest_policy."""
        return self._policies[max(self._policies)] if self._policies else None

    def _in_status(self, split: str, status: TaskStatus) -> list[_TaskState]:
        return [state for state in self._tasks.values() if state.status is status and state.task.split == split]

    def _refusal(self, what: str, *, fence: int, ids: list[str]) -> StaleClaimError:
        reason = f"fence {fence} is old: another worker took the task over"
        self.quarantined[f"{what} at fence {fence}"] = Quarantined(what=what, reason=reason, ids=ids)
        return StaleClaimError(f"{what}: {reason}; stop working on it")

    # --- TrainStore ---------------------------------------------------------------------------------------------

    async def settled_groups(self, *, split: str, limit: int) -> list[SettledGroup]:
        """See TrainStore.settled_groups."""
        groups = [
            SettledGroup(
                settlement=state.settlement,
                sequences=state.sequences,
                settled_at=state.settled_at,
                mean_tool_calls=state.mean_tool_calls,
            )
            for state in self._in_status(split, TaskStatus.SETTLED)
            if state.settlement is not None and state.settled_at is not None
        ]
        return sorted(groups, key=lambda group: group.settled_at)[:limit]

    async def load_sequences(self, ids: Sequence[str]) -> list[DBRecordData]:
        """See TrainStore.load_sequences."""
        missing = [row_id for row_id in ids if row_id not in self._sequences]
        if missing:
            raise StoreError(f"sequence {missing[0]} is not in the store ({len(missing)} of {len(ids)} missing)")
        return [self._sequences[row_id] for row_id in ids]

    async def insert_sequences(self, sequences: Sequence[DBRecordData]) -> int:
        """See TrainStore.insert_sequences."""
        new = {row.id: row for row in sequences if row.id not in self._sequences}
        self._sequences |= new
        return len(new)

    async def list_sequences(self, *, split: str) -> list[str]:
        """See TrainStore.list_sequences."""
        return sorted(row.id for row in self._sequences.values() if row.split == split)

    async def plan_step(self, step: TrainStep) -> TrainStep:
        """See TrainStore.plan_step."""
        known = self._steps.get(step.step)
        if known is None:
            planned_at = step.planned_at or self._clock()
            stored = replace(step, status=StepStatus.PLANNED, planned_at=planned_at)
        else:
            stored = replace(known, attempts=known.attempts + 1)
        self._steps[step.step] = stored
        return stored

    def _consume(self, task_id: str, *, step: int | None, reason: str | None) -> None:
        state = self._tasks.get(task_id)
        if state is not None and state.status is TaskStatus.SETTLED:
            state.status, state.consumed_step, state.drop_reason = TaskStatus.CONSUMED, step, reason

    async def get_step(self, step: int) -> TrainStep | None:
        """See TrainStore.get_step."""
        return self._steps.get(step)

    async def commit_step(self, step: TrainStep) -> None:
        """See TrainStore.commit_step."""
        plan = self._steps.get(step.step)
        if plan is None:
            raise StoreError(f"step {step.step} has no plan: call plan_step before commit_step")
        self._steps[step.step] = replace(
            plan,
            status=StepStatus.COMMITTED,
            metrics=dict(step.metrics),
            alarms=step.alarms,
            checkpoint=step.checkpoint,
            committed_at=step.committed_at or self._clock(),
        )
        for task_id in (task_id for task_id in plan.task_ids if task_id not in plan.retained):
            self._consume(task_id, step=step.step, reason=plan.dropped.get(task_id))

    async def drop_groups(self, drops: Mapping[str, str]) -> None:
        """See TrainStore.drop_groups."""
        for task_id, reason in drops.items():
            self._consume(task_id, step=None, reason=reason)

    async def publish_policy(self, version: PolicyVersion) -> None:
        """See TrainStore.publish_policy."""
        self._policies[version.version] = replace(version, created_at=version.created_at or self._clock())

    async def sampling_stop(self) -> str | None:
        """See TrainStore.sampling_stop."""
        return self._run.get("sampling_stopped")

    # --- ReadStore ----------------------------------------------------------------------------------------------

    async def get_run(self) -> Mapping[str, Any] | None:
        """See ReadStore.get_run."""
        return dict(self._run) or None

    async def put_run(self, run: Mapping[str, Any]) -> None:
        """See ReadStore.put_run."""
        self._run |= run

    async def list_records(
        self, *, split: str | None = None, task_id: str | None = None, limit: int = 50
    ) -> list[Record]:
        """See ReadStore.list_records."""
        records = [
            record
            for record in self._records.values()
            if split in {None, record.split} and task_id in {None, record.task_id}
        ]
        return sorted(records, key=lambda record: (record.started_at or self._clock(), record.id), reverse=True)[:limit]

    async def get_record(self, record_id: str) -> Record | None:
        """See ReadStore.get_record."""
        return self._records.get(record_id)

    async def get_task(self, task_id: str) -> Task | None:
        """See ReadStore.get_task."""
        state = self._tasks.get(task_id)
        return None if state is None else state.task

    async def get_settlement(self, task_id: str) -> GroupSettlement | None:
        """See ReadStore.get_settlement."""
        state = self._tasks.get(task_id)
        return None if state is None else state.settlement

    async def list_steps(self) -> list[TrainStep]:
        """See ReadStore.list_steps."""
        return [self._steps[step] for step in sorted(self._steps)]

    async def steps_of_task(self, task_id: str) -> list[TrainStep]:
        """See ReadStore.steps_of_task."""
        return [step for step in await self.list_steps() if task_id in step.task_ids]

    async def sum_calls(self) -> list[CallCosts]:
        """See ReadStore.sum_calls."""
        return add_up(
            CallCosts(
                kind=call.kind, target=call.target, num_calls=1, cost_nano_usd=call.cost_nano_usd,
                seconds=(call.finished_at - call.started_at).total_seconds(),
            )
            for call in [
                *(call for turn in self._turns.values() for call in (turn.model, *turn.tools)),
                *self._judge_calls.values(),
            ]
        )  # fmt: skip
