"""The seams of the store, one for each kind of user. Import them from `agentrl.protocols`.

All methods are safe to repeat after a lost reply: ids decide, so the second call finds its own work done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from agentrl.calls import CallCosts, SpendingAccount, ToolJournal
from agentrl.score_protocols import ScoreStore
from agentrl.types import (
    DBRecordData,
    DispatchedSamplingTask,
    EngineQuarantine,
    GroupSettlement,
    InferenceService,
    PolicyVersion,
    Record,
    Score,
    SequenceSummary,
    SettledGroup,
    Task,
    TaskClaim,
    TaskStatus,
    TrainStep,
    Turn,
    Worker,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLook:
    """The Tasks of a split, counted as by `count_tasks`, after expired claims were returned to the queue."""

    counts: Mapping[TaskStatus, int]
    reaped: tuple[str, ...]  # ids of the Tasks whose claim had expired


class TaskStore(Protocol):
    """What samplers need: claim Tasks, commit turns, settle groups."""

    async def insert_tasks(self, tasks: Sequence[Task]) -> int:
        """Enqueue Tasks as pending; ids already there are left alone. Returns how many are new."""
        ...

    async def enqueue_epoch(self, *, split: str, epoch: int) -> int | None:
        """Enqueue epoch 0's Tasks of a split again as `epoch`. Idempotent.

        Returns how many are new, or None if epoch 0 is empty: nothing was loaded yet.
        """
        ...

    async def claim_tasks(self, *, split: str, owner: str, lease_s: float, limit: int) -> list[TaskClaim]:
        """Atomically take up to `limit` pending Tasks: given-back ones, then lowest epoch first. Empty: no more."""
        ...

    async def renew_claims(self, claims: Sequence[TaskClaim], *, lease_s: float) -> list[str]:
        """Heartbeat. Returns the Task ids whose claim is lost; their work must stop."""
        ...

    async def release_claim(self, claim: TaskClaim) -> None:
        """Give a Task back (pending) without waiting for its lease to expire. A lost claim is ignored."""
        ...

    async def reap_expired_claims(self, *, split: str) -> list[str]:
        """Return running Tasks with an expired lease (server time) to pending. Returns their ids."""
        ...

    async def open_records(self, claim: TaskClaim) -> list[Record]:
        """All Records of the group under this claim's fence: created where missing, taken over where unfinished.

        Finished Records come back as they are, failed ones under this fence, for `reopen_record`. Raises
        StaleClaimError if the claim was lost.
        """
        ...

    async def load_turns(self, record: Record) -> list[Turn]:
        """The committed turns, in order."""
        ...

    async def commit_turn(self, record: Record, turn: Turn) -> Record:
        """Append one turn; durable when it returns. Raises StaleClaimError (late work goes to Quarantine)."""
        ...

    async def finish_record(self, record: Record) -> None:
        """Write the final header (status, stop reason, answer, score). Raises StaleClaimError."""
        ...

    async def reopen_record(self, record: Record) -> Record:
        """Start a failed Record over as attempt n + 1, without turns; the failed header is copied to Quarantine.

        Returns the new header. Raises StaleClaimError, or StoreError if attempt n of the Record is not failed.
        """
        ...

    async def restart_record(self, record: Record, *, reason: str) -> Record:
        """The same for a running Record that was taken over and cannot be continued: Quarantine says for what reason.

        Returns the new header. Raises StaleClaimError, or StoreError if attempt n of the Record is not running.
        """
        ...

    async def settle_task(
        self, claim: TaskClaim, settlement: GroupSettlement, sequences: Sequence[DBRecordData]
    ) -> None:
        """Write the training rows (idempotent), then flip running -> settled. Raises StaleClaimError."""
        ...

    async def count_tasks(self, *, split: str) -> dict[TaskStatus, int]:
        """How many Tasks are in each status; CONSUMED may be left out where counting it is slow."""
        ...

    async def look_over_tasks(self, *, split: str) -> TaskLook:
        """Both at once, in one round trip where Tasks are few: for the loop that would otherwise ask twice."""
        ...

    async def latest_policy(self) -> PolicyVersion | None:
        """The newest published policy version."""
        ...

    async def list_engine_quarantines(self) -> list[EngineQuarantine]:
        """Every span of an engine whose tokens must not be trained, by id."""
        ...


class TrainStore(Protocol):
    """What the trainer needs: settled groups, rows, the ledger, published versions."""

    async def settled_groups(self, *, split: str, limit: int) -> list[SettledGroup]:
        """Oldest settled, not yet consumed groups."""
        ...

    async def load_sequences(self, ids: Sequence[str]) -> list[DBRecordData]:
        """Rows in the order of `ids`. Raises StoreError naming a missing one."""
        ...

    async def insert_sequences(self, sequences: Sequence[DBRecordData]) -> int:
        """Add rows that no rollout made (supervised data); existing ids are left alone."""
        ...

    async def list_sequences(self, *, split: str) -> list[str]:
        """Ids of all rows of a split, sorted. For supervised training only."""
        ...

    async def plan_step(self, step: TrainStep) -> TrainStep:
        """Insert the plan. Its groups stay settled (they count as outstanding work) until `commit_step`.

        If this step has a plan already, that one is returned with `attempts` raised: a resume replays it exactly.
        """
        ...

    async def get_step(self, step: int) -> TrainStep | None:
        """The ledger entry of a step."""
        ...

    async def commit_step(self, step: TrainStep) -> None:
        """Complete the ledger entry (metrics, checkpoint) after the optimizer step.

        Its groups are marked consumed, but for those its plan retains: they stay settled and may be planned again.
        """
        ...

    async def drop_groups(self, drops: Mapping[str, str]) -> None:
        """Mark settled groups consumed without a step, each with its named reason."""
        ...

    async def publish_policy(self, version: PolicyVersion) -> None:
        """Announce weights that are complete on disk."""
        ...

    async def sampling_stop(self) -> str | None:
        """Why nothing more will be sampled (`sampling_stopped` of the Run document); None: it goes on."""
        ...

    async def latest_policy(self) -> PolicyVersion | None:
        """The newest published policy version."""
        ...

    async def count_tasks(self, *, split: str) -> dict[TaskStatus, int]:
        """How many Tasks are in each status; CONSUMED may be left out where counting it is slow."""
        ...

    async def list_engine_quarantines(self) -> list[EngineQuarantine]:
        """Every span of an engine whose tokens must not be trained, by id."""
        ...

    async def server_time(self) -> datetime:
        """The database server's clock, UTC."""
        ...

    async def get_run(self) -> Mapping[str, Any] | None:
        """The Run document: resolved configuration, times, who resumed after which alarm."""
        ...

    async def close(self) -> None:
        """Flush and disconnect."""
        ...


class FleetStore(Protocol):
    """Who is there: inference services, workers, policy versions."""

    async def server_time(self) -> datetime:
        """The database server's clock, UTC."""
        ...

    async def put_service(self, service: InferenceService) -> None:
        """Register or refresh a service; stamps its heartbeat with server time.

        A new one removes entries that have been silent for an hour, but for the last 32.
        """
        ...

    async def list_services(self) -> list[InferenceService]:
        """All services that are registered, silent ones included."""
        ...

    async def raise_engine_quarantine(self, quarantine: EngineQuarantine) -> None:
        """Exclude what an engine sampled since its last right canary; stamps `raised_at`. Known ids are left alone."""
        ...

    async def lift_engine_quarantine(self, quarantine_id: str, *, until_s: float) -> None:
        """End a span: its engine answers rightly again since `until_s`, by its own clock."""
        ...

    async def list_engine_quarantines(self) -> list[EngineQuarantine]:
        """Every span of an engine whose tokens must not be trained, by id."""
        ...

    async def put_worker(self, worker: Worker) -> None:
        """Register or refresh a worker; stamps its heartbeat with server time. Silent ones go as services do."""
        ...

    async def list_workers(self) -> list[Worker]:
        """All workers that are registered, silent ones included."""
        ...

    async def latest_policy(self) -> PolicyVersion | None:
        """The newest published policy version."""
        ...


class ReadStore(Protocol):
    """What people look at: run, tasks, records, steps. Never changes anything."""

    async def get_run(self) -> Mapping[str, Any] | None:
        """The Run document: resolved configuration, times."""
        ...

    async def put_run(self, run: Mapping[str, Any]) -> None:
        """Create or update the Run document."""
        ...

    async def list_records(
        self, *, split: str | None = None, task_id: str | None = None, limit: int = 50
    ) -> list[Record]:
        """Newest first."""
        ...

    async def get_record(self, record_id: str) -> Record | None:
        """One Record's header."""
        ...

    async def get_task(self, task_id: str) -> Task | None:
        """One Task."""
        ...

    async def get_settlement(self, task_id: str) -> GroupSettlement | None:
        """The decision on a group, once it is settled."""
        ...

    async def load_turns(self, record: Record) -> list[Turn]:
        """The committed turns, in order."""
        ...

    async def list_steps(self) -> list[TrainStep]:
        """The ledger, by step."""
        ...

    async def steps_of_task(self, task_id: str) -> list[TrainStep]:
        """Every step that consumed a group."""
        ...

    async def sum_calls(self) -> list[CallCosts]:
        """Number, time and cost of all calls, by kind and target."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskState:
    """A Task with everything the store knows of its life, as an audit reads it."""

    task: Task
    status: TaskStatus
    fence: int
    lease_until: datetime | None  # running Tasks only
    settlement: GroupSettlement | None
    sequences: tuple[SequenceSummary, ...]  # the rows its settlement wrote
    consumed_step: int | None  # the step that consumed it, trained or not
    drop_reason: str | None  # why its rows were not trained
    settled_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantinedWork:
    """Late work that a fence refused: kept for the record, never used."""

    key: str  # what it was, and at which fence
    reason: str
    ids: tuple[str, ...]  # of the calls, rows or Record it would have written


class AuditStore(Protocol):
    """Every fact of a run, by id and in blocks, for a reader that trusts none of them. Never changes anything.

    The `find_` methods leave out what is not there or cannot be read (logged): its absence is the reader's finding.
    """

    async def server_time(self) -> datetime:
        """The database server's clock, UTC."""
        ...

    async def list_task_ids(self) -> list[str]:
        """Ids of all Tasks of all splits, sorted."""
        ...

    async def list_record_ids(self) -> list[str]:
        """Ids of all Records of all splits, sorted; also those that no Task accounts for."""
        ...

    async def find_tasks(self, ids: Sequence[str]) -> list[TaskState]:
        """Tasks with their state."""
        ...

    async def find_records(self, ids: Sequence[str]) -> list[Record]:
        """Record headers."""
        ...

    async def find_dispatches(self, turn_ids: Sequence[str]) -> dict[str, list[DispatchedSamplingTask]]:
        """The calls of each turn, by turn id and ordered by index."""
        ...

    async def find_sequences(self, ids: Sequence[str]) -> list[DBRecordData]:
        """Training rows."""
        ...

    async def list_steps(self) -> list[TrainStep]:
        """The ledger, by step."""
        ...

    async def find_scores(self, records: Sequence[Record], *, version: str) -> dict[str, Score]:
        """Scores of these Records' present attempts under a version, by record id; those without one are left out."""
        ...

    async def list_policies(self) -> list[PolicyVersion]:
        """Every published policy version, in order."""
        ...

    async def list_quarantined(self) -> list[QuarantinedWork]:
        """Refused late work, by key."""
        ...

    async def list_engine_quarantines(self) -> list[EngineQuarantine]:
        """Every span of an engine whose tokens must not be trained, by id."""
        ...


class Store(
    TaskStore, TrainStore, FleetStore, ToolJournal, SpendingAccount, ReadStore, AuditStore, ScoreStore, Protocol
):
    """All of it: what MongoStore and MemoryStore implement."""

    async def prepare(self) -> None:
        """Create indexes; safe to repeat. Raises UnavailableError if the database cannot be reached."""
        ...

    async def close(self) -> None:
        """Flush and disconnect."""
        ...
