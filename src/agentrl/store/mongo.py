"""MongoStore: the Store on MongoDB 6+ or on the embedded server. One file per duty; this one joins them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from agentrl.protocols import CallCosts, QuarantinedWork, TaskLook, TaskState
from agentrl.store.account import Account
from agentrl.store.attempts import reopen_record, restart_record
from agentrl.store.audit_reads import AuditReader
from agentrl.store.connection import Database
from agentrl.store.fleet import Fleet
from agentrl.store.indexes import RECORD, TASK
from agentrl.store.ledger import Ledger
from agentrl.store.reading import Reader
from agentrl.store.scores import Scores
from agentrl.store.sequences import SequenceRows
from agentrl.store.tasks import TaskQueue
from agentrl.store.tool_journal import ToolCallJournal
from agentrl.store.turns import RecordWriter
from agentrl.types import (
    DBRecordData,
    DispatchedSamplingTask,
    EngineQuarantine,
    GroupSettlement,
    InferenceService,
    JudgeVerdict,
    PolicyVersion,
    Record,
    Score,
    SettledGroup,
    Task,
    TaskClaim,
    TaskStatus,
    ToolCall,
    ToolResult,
    TrainStep,
    Turn,
    Worker,
)


def open_store(uri: str, *, database: str, timeout_s: float = 20.0) -> MongoStore:
    """The store of one run. Connects on first use; call `prepare()` before anything else.

    Raises ConfigError for a URI that is none.
    """
    return MongoStore(Database(uri, name=database, timeout_s=timeout_s), rng=random.Random())


class MongoStore:
    """agentrl.protocols.Store on MongoDB. Every call is bounded, safe to repeat, and survives a server restart.

    Belongs to the event loop of its first call.
    """

    def __init__(self, database: Database, *, rng: random.Random) -> None:
        self._database = database
        self._records = RecordWriter(database)
        self._rows = SequenceRows(database)
        self._tasks = TaskQueue(database, records=self._records, rows=self._rows, rng=rng)
        self._ledger = Ledger(database)
        self._fleet = Fleet(database)
        self._reader = Reader(database)
        self._audit = AuditReader(database)
        self._tool_journal = ToolCallJournal(database)
        self._scores = Scores(database)
        self._account = Account(database)

    async def prepare(self) -> None:
        """See Store.prepare."""
        await self._database.prepare()

    async def list_runs(self) -> list[str]:
        """Names of the runs on this server. May be called before `prepare`, which would create this one.

        Raises UnavailableError if no server answers.
        """
        await self._database.connect()
        return await self._database.list_databases()

    def outlast_outages(self, stop: asyncio.Event) -> None:
        """From now on, wait for a database that is away as long as it takes, or until `stop` is set."""
        self._database.outlast_outages(stop)

    async def close(self) -> None:
        """See Store.close."""
        await self._records.close()
        await self._database.close()

    # --- TaskStore ----------------------------------------------------------------------------------------------

    async def insert_tasks(self, tasks: Sequence[Task]) -> int:
        """See TaskStore.insert_tasks."""
        return await self._tasks.insert(tasks)

    async def enqueue_epoch(self, *, split: str, epoch: int) -> int | None:
        """See TaskStore.enqueue_epoch."""
        return await self._tasks.enqueue_epoch(split=split, epoch=epoch)

    async def claim_tasks(self, *, split: str, owner: str, lease_s: float, limit: int) -> list[TaskClaim]:
        """See TaskStore.claim_tasks."""
        return await self._tasks.claim(split=split, owner=owner, lease_s=lease_s, limit=limit)

    async def renew_claims(self, claims: Sequence[TaskClaim], *, lease_s: float) -> list[str]:
        """See TaskStore.renew_claims."""
        return await self._tasks.renew(claims, lease_s=lease_s)

    async def release_claim(self, claim: TaskClaim) -> None:
        """See TaskStore.release_claim."""
        await self._tasks.release(claim)

    async def reap_expired_claims(self, *, split: str) -> list[str]:
        """See TaskStore.reap_expired_claims."""
        return await self._tasks.reap(split=split)

    async def open_records(self, claim: TaskClaim) -> list[Record]:
        """See TaskStore.open_records."""
        return await self._records.open(claim)

    async def load_turns(self, record: Record) -> list[Turn]:
        """See TaskStore.load_turns."""
        return await self._reader.load_turns(record)

    async def commit_turn(self, record: Record, turn: Turn) -> Record:
        """See TaskStore.commit_turn. Concurrent calls share their waits for the journal."""
        return await self._records.commit(record, turn)

    async def finish_record(self, record: Record) -> None:
        """See TaskStore.finish_record."""
        await self._records.finish(record)

    async def reopen_record(self, record: Record) -> Record:
        """See TaskStore.reopen_record."""
        return await reopen_record(record, database=self._database, quarantine=self._records.quarantine)

    async def restart_record(self, record: Record, *, reason: str) -> Record:
        """See TaskStore.restart_record."""
        return await restart_record(record, reason=reason, database=self._database, quarantine=self._records.quarantine)

    async def find_result(self, call: ToolCall) -> ToolResult | None:
        """See ToolJournal.find_result."""
        return await self._tool_journal.find_result(call)

    async def put_result(self, call: ToolCall, result: ToolResult) -> ToolResult:
        """See ToolJournal.put_result."""
        return await self._tool_journal.put_result(call, result)

    async def find_equal(self, call: ToolCall, *, max_age_s: float) -> ToolResult | None:
        """See ToolJournal.find_equal."""
        return await self._tool_journal.find_equal(call, max_age_s=max_age_s)

    async def put_equal(self, call: ToolCall, result: ToolResult, *, max_age_s: float) -> ToolResult:
        """See ToolJournal.put_equal."""
        return await self._tool_journal.put_equal(call, result, max_age_s=max_age_s)

    async def reserve(self, reservation: str, *, amount: int, limit: int | None) -> bool:
        """See SpendingAccount.reserve."""
        return await self._account.reserve(reservation, amount=amount, limit=limit)

    async def settle(self, reservation: str, *, amount: int) -> None:
        """See SpendingAccount.settle."""
        await self._account.settle(reservation, amount=amount)

    async def spent(self) -> int:
        """See SpendingAccount.spent."""
        return await self._account.spent()

    async def settle_task(
        self, claim: TaskClaim, settlement: GroupSettlement, sequences: Sequence[DBRecordData]
    ) -> None:
        """See TaskStore.settle_task."""
        await self._tasks.settle(claim, settlement, sequences)

    async def count_tasks(self, *, split: str) -> dict[TaskStatus, int]:
        """See TaskStore.count_tasks."""
        return await self._tasks.count(split=split)

    async def look_over_tasks(self, *, split: str) -> TaskLook:
        """See TaskStore.look_over_tasks."""
        return await self._tasks.look_over(split=split)

    async def latest_policy(self) -> PolicyVersion | None:
        """See TaskStore.latest_policy."""
        return await self._ledger.latest_policy()

    # --- TrainStore ---------------------------------------------------------------------------------------------

    async def settled_groups(self, *, split: str, limit: int) -> list[SettledGroup]:
        """See TrainStore.settled_groups."""
        return await self._ledger.settled_groups(split=split, limit=limit)

    async def load_sequences(self, ids: Sequence[str]) -> list[DBRecordData]:
        """See TrainStore.load_sequences."""
        return await self._rows.load(ids)

    async def insert_sequences(self, sequences: Sequence[DBRecordData]) -> int:
        """See TrainStore.insert_sequences."""
        return await self._rows.insert(sequences)

    async def list_sequences(self, *, split: str) -> list[str]:
        """See TrainStore.list_sequences."""
        return await self._rows.list(split=split)

    async def plan_step(self, step: TrainStep) -> TrainStep:
        """See TrainStore.plan_step."""
        return await self._ledger.plan(step)

    async def get_step(self, step: int) -> TrainStep | None:
        """See TrainStore.get_step."""
        return await self._ledger.get(step)

    async def commit_step(self, step: TrainStep) -> None:
        """See TrainStore.commit_step."""
        await self._ledger.commit(step)

    async def drop_groups(self, drops: Mapping[str, str]) -> None:
        """See TrainStore.drop_groups."""
        await self._ledger.drop(drops)

    async def publish_policy(self, version: PolicyVersion) -> None:
        """See TrainStore.publish_policy."""
        await self._ledger.publish(version)

    async def sampling_stop(self) -> str | None:
        """See TrainStore.sampling_stop."""
        return (await self._reader.get_run() or {}).get("sampling_stopped")

    # --- FleetStore ---------------------------------------------------------------------------------------------

    async def server_time(self) -> datetime:
        """See FleetStore.server_time."""
        return await self._database.run("read the clock", self._database.clock.now)

    async def put_service(self, service: InferenceService) -> None:
        """See FleetStore.put_service."""
        await self._fleet.put_service(service)

    async def list_services(self) -> list[InferenceService]:
        """See FleetStore.list_services."""
        return await self._fleet.list_services()

    async def raise_engine_quarantine(self, quarantine: EngineQuarantine) -> None:
        """See FleetStore.raise_engine_quarantine."""
        await self._fleet.raise_quarantine(quarantine)

    async def lift_engine_quarantine(self, quarantine_id: str, *, until_s: float) -> None:
        """See FleetStore.lift_engine_quarantine."""
        await self._fleet.lift_quarantine(quarantine_id, until_s=until_s)

    async def list_engine_quarantines(self) -> list[EngineQuarantine]:
        """See FleetStore.list_engine_quarantines."""
        return await self._fleet.list_quarantines()

    async def put_worker(self, worker: Worker) -> None:
        """See FleetStore.put_worker."""
        await self._fleet.put_worker(worker)

    async def list_workers(self) -> list[Worker]:
        """See FleetStore.list_workers."""
        return await self._fleet.list_workers()

    # --- ReadStore ----------------------------------------------------------------------------------------------

    async def get_run(self) -> Mapping[str, Any] | None:
        """See ReadStore.get_run."""
        return await self._reader.get_run()

    async def put_run(self, run: Mapping[str, Any]) -> None:
        """See ReadStore.put_run."""
        await self._reader.put_run(run)

    async def list_records(
        self, *, split: str | None = None, task_id: str | None = None, limit: int = 50
    ) -> list[Record]:
        """See ReadStore.list_records."""
        return await self._reader.list_records(split=split, task_id=task_id, limit=limit)

    async def get_record(self, record_id: str) -> Record | None:
        """See ReadStore.get_record."""
        return await self._reader.get_record(record_id)

    async def get_task(self, task_id: str) -> Task | None:
        """See ReadStore.get_task."""
        return await self._reader.get_task(task_id)

    async def get_settlement(self, task_id: str) -> GroupSettlement | None:
        """See ReadStore.get_settlement."""
        return await self._reader.get_settlement(task_id)

    async def list_steps(self) -> list[TrainStep]:
        """See ReadStore.list_steps."""
        return await self._ledger.list_steps()

    async def steps_of_task(self, task_id: str) -> list[TrainStep]:
        """See ReadStore.steps_of_task."""
        return await self._ledger.steps_of_task(task_id)

    async def sum_calls(self) -> list[CallCosts]:
        """See ReadStore.sum_calls."""
        return await self._account.sum_calls()

    # --- AuditStore ---------------------------------------------------------------------------------------------

    async def list_task_ids(self) -> list[str]:
        """See AuditStore.list_task_ids."""
        return await self._audit.list_ids(TASK)

    async def list_record_ids(self) -> list[str]:
        """See AuditStore.list_record_ids."""
        return await self._audit.list_ids(RECORD)

    async def find_tasks(self, ids: Sequence[str]) -> list[TaskState]:
        """See AuditStore.find_tasks."""
        return await self._audit.find_tasks(ids)

    async def find_records(self, ids: Sequence[str]) -> list[Record]:
        """See AuditStore.find_records."""
        return await self._audit.find_records(ids)

    async def find_dispatches(self, turn_ids: Sequence[str]) -> dict[str, list[DispatchedSamplingTask]]:
        """See AuditStore.find_dispatches."""
        return await self._audit.find_dispatches(turn_ids)

    async def find_sequences(self, ids: Sequence[str]) -> list[DBRecordData]:
        """See AuditStore.find_sequences."""
        return await self._audit.find_sequences(ids)

    async def list_policies(self) -> list[PolicyVersion]:
        """See AuditStore.list_policies."""
        return await self._audit.list_policies()

    async def list_quarantined(self) -> list[QuarantinedWork]:
        """See AuditStore.list_quarantined."""
        return await self._audit.list_quarantined()

    # --- ScoreStore ---------------------------------------------------------------------------------------------

    async def find_verdicts(self, keys: Sequence[str]) -> dict[str, JudgeVerdict]:
        """See VerdictCache.find_verdicts."""
        return await self._scores.find_verdicts(keys)

    async def put_verdict(self, verdict: JudgeVerdict) -> JudgeVerdict:
        """See VerdictCache.put_verdict."""
        return await self._scores.put_verdict(verdict)

    async def put_calls(self, calls: Sequence[DispatchedSamplingTask]) -> None:
        """See ScoreStore.put_calls."""
        await self._scores.put_calls(calls)

    async def list_calls(self, record_id: str) -> list[DispatchedSamplingTask]:
        """See ScoreStore.list_calls."""
        return await self._scores.list_calls(record_id)

    async def put_score(self, score: Score) -> Score:
        """See ScoreStore.put_score."""
        return await self._scores.put_score(score)

    async def find_scores(self, records: Sequence[Record], *, version: str) -> dict[str, Score]:
        """See ScoreStore.find_scores."""
        return await self._scores.find_scores(records, version=version)

    async def count_scores(self) -> dict[str, int]:
        """See ScoreStore.count_scores."""
        return await self._scores.count_scores()
