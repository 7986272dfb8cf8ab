"""Checks on one group: its completeness, its settlement recomputed from the Records, and what became of it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from agentrl.algo.merge import merge_record
from agentrl.algo.settle import DropReason, is_scored, settle_group
from agentrl.config import RunConfig
from agentrl.inspector.audit_facts import GroupFacts, LedgerFacts
from agentrl.inspector.audit_report import Check, Finding
from agentrl.types import DBRecordData, GroupOutcome, GroupSettlement, Record, StepStatus, TaskStatus

_DROP_REASONS = frozenset(reason.value for reason in DropReason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """What settling the stored Records again gives; `fault` says why it could not be done."""

    settlement: GroupSettlement | None
    rows: Mapping[str, DBRecordData]
    fault: str = ""


def recompute(facts: GroupFacts, *, config: RunConfig) -> Recomputed:
    """Settle the group again from its stored Records and turns, with the run's configuration."""
    turns = {record.id: facts.turns_of(record) for record in facts.records}
    records = facts.scored_records
    missing = [record.id for record in records if turns[record.id] is None and is_scored(record)]
    if missing:
        return Recomputed(settlement=None, rows={}, fault=f"calls of {missing[0]} are missing")
    try:
        settlement, rows = settle_group(
            facts.state.task,
            records,
            {record_id: found or () for record_id, found in turns.items()},
            algo=config.algo,
            min_turns=config.rollout.min_turns,
            score_version=None if facts.state.settlement is None else facts.state.settlement.score_version,
        )
    except ValueError as error:
        return Recomputed(settlement=None, rows={}, fault=str(error))
    return Recomputed(settlement=settlement, rows={row.id: row for row in rows})


def rebuild(row: DBRecordData, record: Record | None, facts: GroupFacts) -> tuple[DBRecordData | None, str]:
    """The row again from its Record's turns where the settlement would not give it, and why if that fails."""
    turns = None if record is None else facts.turns_of(record)
    if record is None or turns is None:
        return None, "its Record or calls of its Record are missing"
    try:
        merged = merge_record(record, turns, reward=row.reward, advantages=[0.0] * len(turns))
    except ValueError as error:
        return None, str(error)
    found = [candidate for candidate in merged if candidate.id == row.id]
    return (found[0], "") if found else (None, f"merging gives {len(merged)} rows, not this one")


def check_completeness(facts: GroupFacts) -> Iterator[Finding]:
    """A settled group has all its final Records, or says how many it lacks."""
    settlement = facts.state.settlement
    if settlement is None:
        message = f"{facts.state.status.value}, but there is no settlement"
        yield Finding(check=Check.GROUP_COMPLETENESS, subject=facts.task_id, message=message)
        return
    wanted = facts.state.task.num_generations
    num_scored = sum(is_scored(record) for record in facts.scored_records)
    shortfall = max(wanted, len(facts.records)) - num_scored
    if settlement.num_failed != shortfall:
        message = f"{num_scored} of {wanted} Records are scored, but num_failed = {settlement.num_failed}"
        yield Finding(check=Check.GROUP_COMPLETENESS, subject=facts.task_id, message=message)
    known = {record.id for record in facts.records}
    for record_id in [record_id for record_id in settlement.rewards if record_id not in known]:
        message = f"its settlement rewards {record_id}, which is not in the store"
        yield Finding(check=Check.GROUP_COMPLETENESS, subject=facts.task_id, message=message)


def check_settlement(facts: GroupFacts, recomputed: Recomputed) -> Iterator[Finding]:
    """The stored decision is the one its Records lead to."""
    settlement = facts.state.settlement
    if settlement is None:
        return
    for message in _settlement_faults(facts, settlement, recomputed):
        yield Finding(check=Check.SETTLEMENT, subject=facts.task_id, message=message)


def _settlement_faults(facts: GroupFacts, settlement: GroupSettlement, recomputed: Recomputed) -> Iterator[str]:
    failed = [r.id for r in facts.scored_records if not is_scored(r) and r.id in settlement.rewards]
    if failed:
        why = "failed" if settlement.score_version is None else f"has no score of {settlement.score_version}"
        yield f"{failed[0]} {why}, but has reward {settlement.rewards[failed[0]]:g}"
    is_dropped = settlement.outcome is GroupOutcome.DROPPED
    if is_dropped is not (settlement.drop_reason in _DROP_REASONS):
        yield f"{settlement.outcome.value} with drop reason {settlement.drop_reason}"
    expected = recomputed.settlement
    if expected is None:
        yield f"cannot be recomputed: {recomputed.fault}"
        return
    decided = (settlement.outcome.value, settlement.drop_reason)
    decides = (expected.outcome.value, expected.drop_reason)
    if decided != decides:
        yield f"is {_decision(*decided)}, its Records make it {_decision(*decides)}"
    numbers = ["rewards", "advantages"]
    if settlement.scores:  # settlements of earlier versions kept neither scores nor reasons
        numbers.append("scores")
        yield from _reason_faults(settlement.untrained, expected.untrained)
        if settlement.episode_scores != expected.episode_scores:
            of_records = expected.episode_scores.items()
            others = [key for key, scores in of_records if settlement.episode_scores.get(key) != scores]
            yield f"scores by episode are not those of its Records; see {', '.join(others) or 'those without episodes'}"
    for name in numbers:
        yield from _number_faults(name, getattr(settlement, name), getattr(expected, name))
    if settlement.engines and settlement.engines != expected.engines:
        yield f"names {len(settlement.engines)} engines and when they sampled, its calls say otherwise"
    named = {row.id for row in facts.state.sequences}
    if named != recomputed.rows.keys():
        odd = sorted(named ^ recomputed.rows.keys())[0]
        yield f"names {len(named)} rows, its Records give {len(recomputed.rows)}; {odd} is on one side only"


def _decision(outcome: str, reason: str | None) -> str:
    return outcome if reason is None else f"{outcome} ({reason})"


def _reason_faults(stored: Mapping[str, str], expected: Mapping[str, str]) -> Iterator[str]:
    for record_id in sorted(stored.keys() | expected.keys()):
        said, says = stored.get(record_id), expected.get(record_id)
        if said != says:
            yield f"{record_id} is {_trained(said)}, recomputed {_trained(says)}"


def _trained(reason: str | None) -> str:
    return "trained" if reason is None else f"not trained ({reason})"


def _number_faults(name: str, stored: Mapping[str, float], expected: Mapping[str, float]) -> Iterator[str]:
    if odd := sorted(stored.keys() ^ expected.keys()):
        yield f"{name} are of {len(stored)} Records, expected {len(expected)}; {odd[0]} is on one side only"
    for record_id in stored.keys() & expected.keys():
        if not math.isclose(stored[record_id], expected[record_id], rel_tol=1e-9, abs_tol=1e-12):
            yield f"{name}[{record_id}] = {stored[record_id]:g}, recomputed {expected[record_id]:g}"


def check_score_versions(facts: GroupFacts, ledger: LedgerFacts) -> Iterator[Finding]:
    """Settlement, rows and steps name the same version of the scores the group was settled with."""
    settlement = facts.state.settlement
    if settlement is None:
        return
    version = settlement.score_version
    for row in facts.rows.values():
        if row.score_version != version:
            message = f"was made from {_scores(row.score_version)}, its group was settled with {_scores(version)}"
            yield Finding(check=Check.SCORE_VERSIONS, subject=row.id, message=message)
    for number in ledger.steps_of_task.get(facts.task_id, ()):
        stated = ledger.steps[number].score_versions.get(facts.task_id)
        if stated != version:
            message = f"step {number} uses it as settled with {_scores(stated)}, it was settled with {_scores(version)}"
            yield Finding(check=Check.SCORE_VERSIONS, subject=facts.task_id, message=message)


def _scores(version: str | None) -> str:
    return "its Records' own scores" if version is None else f"scores of {version}"


def check_consumption(facts: GroupFacts, ledger: LedgerFacts) -> Iterator[Finding]:
    """Exactly once: the group's status, the ledger and its rows tell the same story.

    A step that retains a group does not consume it, so others may use it after that one.
    """
    steps = ledger.steps_of_task.get(facts.task_id, ())
    for message in _repetition_faults(steps, facts, ledger):
        yield Finding(check=Check.CONSUMPTION, subject=facts.task_id, message=message)
    for message in _status_faults(facts, ledger):
        yield Finding(check=Check.CONSUMPTION, subject=facts.task_id, message=message)
    for row_id in sorted({row.id for row in facts.state.sequences} - facts.rows.keys() - ledger.steps_of_row.keys()):
        message = "named by its group's settlement, but not in the store"
        yield Finding(check=Check.CONSUMPTION, subject=row_id, message=message)
    for row_id in ledger.rows_of_task.get(facts.task_id, ()):
        for message in _row_faults(facts, ledger, row_id):
            yield Finding(check=Check.CONSUMPTION, subject=row_id, message=message)
    for step in steps:
        for message in _left_out(facts, ledger, step):
            yield Finding(check=Check.CONSUMPTION, subject=facts.task_id, message=message)


def _repetition_faults(steps: Sequence[int], facts: GroupFacts, ledger: LedgerFacts) -> Iterator[str]:
    """Steps that use the same group: few enough, far enough apart, and every one but the last retains it."""
    listed = ", ".join(map(str, steps))
    if len(steps) > ledger.max_trained_count:
        yield f"used {len(steps)} times, by steps {listed}: max_trained_count = {ledger.max_trained_count}"
    if any(later - earlier < ledger.retrained_interval for earlier, later in pairwise(steps)):
        yield f"used by steps {listed}: retrained_interval = {ledger.retrained_interval}"
    consuming = [number for number in steps[:-1] if facts.task_id not in ledger.steps[number].retained]
    if consuming:
        yield f"used by steps {listed}, but step {consuming[0]} consumes it"


def _status_faults(facts: GroupFacts, ledger: LedgerFacts) -> Iterator[str]:
    state = facts.state
    steps = [ledger.steps[number] for number in ledger.steps_of_task.get(facts.task_id, ())]
    if steps and not facts.is_settled:
        yield f"{state.status.value}, but step {steps[0].step} uses it"
        return
    consuming = [step for step in steps if facts.task_id not in step.retained]
    committed = [step for step in consuming if step.status is StepStatus.COMMITTED]
    if committed and state.status is not TaskStatus.CONSUMED:
        yield f"{state.status.value}, but step {committed[0].step} is committed and uses it"
    if state.status is not TaskStatus.CONSUMED:
        return
    if consuming and state.consumed_step not in {step.step for step in consuming}:
        yield f"consumed by step {state.consumed_step}, the ledger says {consuming[0].step}"
    if not consuming and state.consumed_step in ledger.steps:
        yield f"consumed by step {state.consumed_step}, which does not consume it"
    reason = consuming[0].dropped.get(facts.task_id) if consuming else None
    if consuming and state.drop_reason != reason:
        yield f"drop reason {state.drop_reason}, the ledger says {reason}"
    if not consuming and state.consumed_step is None and not state.drop_reason:
        yield "consumed without a step and without a drop reason"


def _row_faults(facts: GroupFacts, ledger: LedgerFacts, row_id: str) -> Iterator[str]:
    steps = ledger.steps_of_row[row_id]
    yield from _repetition_faults(steps, facts, ledger)
    if row_id not in facts.rows:
        yield f"trained in step {steps[0]}, but not in the store"
    for number in dict.fromkeys(steps):
        step = ledger.steps[number]
        if facts.task_id not in step.task_ids:
            yield f"trained in step {number}, which does not use its group"
        elif facts.task_id in step.dropped:
            yield f"trained in step {number}, which dropped its group ({step.dropped[facts.task_id]})"


def _left_out(facts: GroupFacts, ledger: LedgerFacts, number: int) -> Iterator[str]:
    """A step that trains a group trains all of its rows, and only those."""
    step = ledger.steps[number]
    settlement = facts.state.settlement
    if facts.task_id in step.dropped or settlement is None:
        return
    named = {row.id for row in facts.state.sequences}
    trained = {row_id for row_id in ledger.rows_of_task.get(facts.task_id, ()) if number in ledger.steps_of_row[row_id]}
    if left_out := sorted(named - trained):
        yield f"step {number} left out {left_out[0]} ({len(left_out)} of {len(named)} rows) without a reason"
    if added := sorted(trained - named):
        yield f"step {number} trains {added[0]}, which its settlement does not name"
