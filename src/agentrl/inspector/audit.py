"""The audit: recompute a run's guarantees from what is stored, and name every contradiction.

    ledger ─► late work ─► groups, page by page ─────────────► versions ─► checkpoints ─► ledger again
                             Task, Records, turns, rows
                             each checked alone; only ids and sums stay behind

It holds a page of groups at a time and reads the next one meanwhile. The order of reading makes it safe on a run that
goes on: a fact is compared only with facts that must have been there when it was written.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from agentrl.config import RunConfig
from agentrl.inspector.audit_episodes import check_episodes
from agentrl.inspector.audit_facts import GroupFacts, LedgerFacts, RunTally
from agentrl.inspector.audit_groups import (
    Recomputed,
    check_completeness,
    check_consumption,
    check_score_versions,
    check_settlement,
    rebuild,
    recompute,
)
from agentrl.inspector.audit_ledger import (
    check_checkpoints,
    check_known,
    check_late_work,
    check_order,
    check_readable,
    check_sampled_versions,
    check_strays,
    check_versions,
    checkpoints_on_disk,
)
from agentrl.inspector.audit_records import (
    check_chain,
    check_counters,
    check_identity,
    check_leases,
    check_outcomes,
)
from agentrl.inspector.audit_report import AuditReport, Check, Verdicts
from agentrl.inspector.audit_rows import (
    add_row,
    check_engines,
    check_exactness,
    check_row_totals,
    check_staleness,
    check_step_totals,
    check_values,
)
from agentrl.protocols import AuditStore, TaskState
from agentrl.types import DBRecordData, EngineQuarantine, Record, RecordStatus, Score, TaskStatus

PAGE_RECORDS = 128
ROW_BLOCK = 256


async def audit_run(store: AuditStore, *, config: RunConfig, run_dir: Path | None) -> AuditReport:
    """Check every guarantee of a run that its stored facts can prove, for `agentrl audit` and for tests.

    `config` is the one the run was made with: the staleness bound and the settlement are recomputed from it. Without
    `run_dir` the checkpoints on disk are not compared with the ledger. Raises StoreError if a document cannot be read.
    """
    started = time.perf_counter()
    ledger = LedgerFacts.from_steps(await store.list_steps(), config=config)
    refused = {turn_id: work.key for work in await store.list_quarantined() for turn_id in work.ids}
    quarantines = await store.list_engine_quarantines()
    audit = _Audit(config=config, ledger=ledger, refused=refused, quarantines=quarantines)
    unaccounted = set(await store.list_record_ids())
    async for now, task_ids, page in _pages(store, task_ids=await store.list_task_ids(), ledger=ledger):
        audit.verdicts.add(check_readable(task_ids, [facts.task_id for facts in page]))
        for facts in page:
            listed = unaccounted.intersection(record_ids_of(facts.state))
            unaccounted -= listed
            audit.verdicts.add(check_readable(listed, [record.id for record in facts.records]))
            audit.visit(facts, now=now)
    await _visit_loose_rows(store, audit)
    audit.verdicts.add(check_strays(await store.find_records(sorted(unaccounted))))
    policies = await store.list_policies()
    checkpoints = None if run_dir is None else checkpoints_on_disk(run_dir)
    latest = {step.step: step for step in await store.list_steps()}
    verdicts = audit.verdicts
    verdicts.count(Check.LEDGER, len(latest))
    verdicts.count(Check.POLICY_VERSIONS, len(audit.tally.sampled_versions))
    verdicts.count(Check.LATE_WORK, len(refused))
    verdicts.add(check_order(list(latest.values())))
    verdicts.add(check_versions(ledger, policies=policies, latest=latest))
    if checkpoints is not None:
        verdicts.add(check_checkpoints(ledger, checkpoints=checkpoints, latest=latest))
    verdicts.add(check_known(ledger, audit.tally, latest=latest))
    verdicts.add(check_step_totals(ledger, audit.tally.totals))
    verdicts.add(check_sampled_versions(audit.tally.sampled_versions, policies))
    return AuditReport(
        run_name=config.run.run_name,
        results=verdicts.results(),
        counts={**audit.counts, "steps": len(latest)},
        seconds=time.perf_counter() - started,
    )


def record_ids_of(state: TaskState) -> list[str]:
    """The ids a Task's Records have."""
    return [f"{state.task.id}/g{generation}" for generation in range(state.task.num_generations)]


@dataclass(slots=True, kw_only=True)
class _Audit:
    """The verdicts so far, and what later checks need of what was read."""

    config: RunConfig
    ledger: LedgerFacts
    refused: Mapping[str, str]  # ids of quarantined calls -> what was refused
    quarantines: Sequence[EngineQuarantine]
    verdicts: Verdicts = field(default_factory=Verdicts)
    tally: RunTally = field(default_factory=RunTally)
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("tasks", "records", "turns", "rows", "trained tokens"), 0)
    )

    def visit(self, facts: GroupFacts, *, now: datetime) -> None:
        """All checks of one group."""
        self.counts["tasks"] += 1
        self._visit_records(facts, now=now)
        recomputed = Recomputed(settlement=None, rows={}, fault="the group is not settled")
        if facts.is_settled:
            recomputed = recompute(facts, config=self.config)
            self.verdicts.count(Check.GROUP_COMPLETENESS)
            self.verdicts.count(Check.SETTLEMENT)
            self.verdicts.add(check_completeness(facts))
            self.verdicts.add(check_settlement(facts, recomputed))
            self.verdicts.count(Check.SCORE_VERSIONS)
            self.verdicts.add(check_score_versions(facts, self.ledger))
        self._visit_consumption(facts)
        for row in facts.rows.values():
            self._visit_row(row, facts, recomputed)

    def _visit_records(self, facts: GroupFacts, *, now: datetime) -> None:
        verdicts = self.verdicts
        verdicts.count(Check.LEASES)
        for check in (Check.RECORD_IDENTITY, Check.OUTCOMES, Check.EPISODES, Check.COUNTERS):
            verdicts.count(check, len(facts.records))
        verdicts.add(check_identity(facts))
        verdicts.add(check_outcomes(facts.records))
        verdicts.add(check_leases(facts, now=now, lease_s=self.config.store.lease_s))
        verdicts.add(check_counters(facts))
        for record in facts.records:
            self.counts["records"] += 1
            self.counts["turns"] += len(record.turn_ids)
            verdicts.count(Check.TURN_CHAIN, len(record.turn_ids))
            verdicts.add(check_chain(record, facts))
            verdicts.add(check_episodes(record, facts))
            if record.status is not RecordStatus.FAILED:  # a failed attempt is in Quarantine before it is given up
                turn_ids = self._turns_in_use(record)
                verdicts.add(check_late_work(turn_ids, self.refused, subject=record.id, what="committed"))
            self._note_versions(record, facts)

    def _turns_in_use(self, record: Record) -> list[str]:
        """Committed turns, without those of a running attempt that is just being given up: Quarantine comes first."""
        given_up = f"attempt {record.attempt} of {record.id}" if record.status is RecordStatus.RUNNING else None
        return [turn_id for turn_id in record.turn_ids if self.refused.get(turn_id) != given_up or given_up is None]

    def _note_versions(self, record: Record, facts: GroupFacts) -> None:
        for turn_id in record.turn_ids:
            for call in facts.calls.get(turn_id, ())[:1]:
                for span in call.tokens.version_spans if call.tokens is not None else ():
                    self.tally.sampled_versions.setdefault(span.version, record.id)

    def _visit_consumption(self, facts: GroupFacts) -> None:
        state = facts.state
        self.verdicts.count(Check.CONSUMPTION)
        self.verdicts.add(check_consumption(facts, self.ledger))
        if facts.task_id in self.ledger.steps_of_task or facts.task_id in self.ledger.rows_of_task:
            self.tally.seen_tasks_of_ledger.add(facts.task_id)
        consumed_step = state.consumed_step if state.status is TaskStatus.CONSUMED else None
        if consumed_step is not None and consumed_step not in self.ledger.steps:
            self.tally.consumed_later[facts.task_id] = consumed_step

    def _visit_row(self, row: DBRecordData, facts: GroupFacts, recomputed: Recomputed) -> None:
        verdicts = self.verdicts
        record = next((record for record in facts.records if record.id == row.record_id), None)
        expected, why = recomputed.rows.get(row.id), ""
        if expected is None:
            expected, why = rebuild(row, record, facts)
        committed = () if record is None else record.turn_ids
        verdicts.count(Check.TOKEN_EXACTNESS)
        verdicts.add(check_exactness(row, expected, committed=committed, why=why))
        verdicts.add(check_late_work(row.turn_ids, self.refused, subject=row.id, what="holds"))
        settlement = facts.state.settlement
        verdicts.count(Check.STEP_TOTALS)
        verdicts.add(
            check_row_totals(
                row,
                summary=next((summary for summary in facts.state.sequences if summary.id == row.id), None),
                reward=None if settlement is None else settlement.rewards.get(row.record_id),
                expected=recomputed.rows.get(row.id),
            )
        )
        for number in dict.fromkeys(self.ledger.steps_of_row.get(row.id, ())):
            verdicts.count(Check.QUARANTINED_ENGINES)
            step = self.ledger.steps[number]
            verdicts.add(check_engines(row, step=step, facts=facts, quarantines=self.quarantines))
        self.visit_trained(row)

    def visit_trained(self, row: DBRecordData) -> None:
        """The checks of a row that need no group: values, staleness, and its share of its step's totals."""
        self.counts["rows"] += 1
        self.verdicts.count(Check.TRAINED_TOKENS)
        self.verdicts.add(check_values(row, is_supervised=self.ledger.is_supervised))
        steps = dict.fromkeys(self.ledger.steps_of_row.get(row.id, ()))
        if steps:
            self.tally.seen_rows_of_ledger.add(row.id)
            self.counts["trained tokens"] += int(row.loss_mask.sum())
        if row.policy_versions.size != row.loss_mask.size:
            return
        for number in steps:
            step = self.ledger.steps[number]
            add_row(self.tally.of_step(number), row, step=step)
            if not self.ledger.is_supervised:
                self.verdicts.count(Check.STALENESS)
                max_staleness = self.config.algo.max_staleness
                self.verdicts.add(check_staleness(row, step=step, max_staleness=max_staleness))


async def _pages(
    store: AuditStore, *, task_ids: Sequence[str], ledger: LedgerFacts
) -> AsyncIterator[tuple[datetime, Sequence[str], list[GroupFacts]]]:
    """Groups by pages of about `PAGE_RECORDS` Records, the next page being read while one is checked."""
    if not task_ids:
        return
    start, size = 0, 1
    coming = asyncio.create_task(_read_page(store, task_ids[:size], ledger=ledger))
    try:
        while start < len(task_ids):
            now, page = await coming
            asked_for = task_ids[start : start + size]
            start += size
            num_records = sum(facts.state.task.num_generations for facts in page)
            size = max(1, PAGE_RECORDS * len(page) // num_records) if page else 1
            if start < len(task_ids):
                coming = asyncio.create_task(_read_page(store, task_ids[start : start + size], ledger=ledger))
            yield now, asked_for, page
    finally:
        coming.cancel()


async def _read_page(
    store: AuditStore, task_ids: Sequence[str], *, ledger: LedgerFacts
) -> tuple[datetime, list[GroupFacts]]:
    """Tasks before Records, Records before calls: what a fact refers to was written before it."""
    now = await store.server_time()
    states = await store.find_tasks(task_ids)
    records = {
        record.id: record
        for record in await store.find_records([record_id for state in states for record_id in record_ids_of(state)])
    }
    calls = await store.find_dispatches([turn_id for record in records.values() for turn_id in record.turn_ids])
    scores = await _read_scores(store, states, records=records)
    row_ids = {state.task.id: _row_ids(state, ledger) for state in states}
    rows = {row.id: row for row in await store.find_sequences([row_id for ids in row_ids.values() for row_id in ids])}
    return now, [
        GroupFacts(
            state=state,
            records=tuple(records[record_id] for record_id in record_ids_of(state) if record_id in records),
            calls=calls,
            rows={row_id: rows[row_id] for row_id in row_ids[state.task.id] if row_id in rows},
            scores=scores.get(state.task.id, {}),
        )
        for state in states
    ]


async def _read_scores(
    store: AuditStore, states: Sequence[TaskState], *, records: Mapping[str, Record]
) -> dict[str, dict[str, Score]]:
    """By Task, the Scores of the version its settlement names; nothing where it has the Records' own."""
    scores = {}
    for state in states:
        if state.settlement is not None and state.settlement.score_version is not None:
            group = [records[record_id] for record_id in record_ids_of(state) if record_id in records]
            scores[state.task.id] = await store.find_scores(group, version=state.settlement.score_version)
    return scores


def _row_ids(state: TaskState, ledger: LedgerFacts) -> list[str]:
    """Rows of a group: those its settlement names, and those the ledger trained."""
    named = [row.id for row in state.sequences]
    return list(dict.fromkeys([*named, *ledger.rows_of_task.get(state.task.id, ())]))


async def _visit_loose_rows(store: AuditStore, audit: _Audit) -> None:
    """Trained rows that belong to no Task: supervised ones; of any other run they are findings of `check_known`."""
    loose = [row_id for row_id in audit.ledger.steps_of_row if row_id not in audit.tally.seen_rows_of_ledger]
    if not audit.ledger.is_supervised:
        return
    for start in range(0, len(loose), ROW_BLOCK):
        for row in await store.find_sequences(loose[start : start + ROW_BLOCK]):
            audit.visit_trained(row)
