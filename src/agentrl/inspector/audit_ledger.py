"""Checks on the run as a whole: ledger, checkpoints, published versions, stray work.

Pure, apart from looking into the checkpoint folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from agentrl.inspector.audit_facts import LedgerFacts, RunTally, task_of_row
from agentrl.inspector.audit_report import Check, Finding
from agentrl.types import PolicyVersion, Record, StepStatus, TrainStep

_STEP_NAME = re.compile(r"step_(\d+)")
_STATE_FILE = "checkpoint.json"  # a checkpoint is complete once it has its name and this file


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOnDisk:
    """A complete checkpoint: the step in its name and the one it says it is of."""

    path: Path
    step: int
    stated_step: int | None


def checkpoints_on_disk(run_dir: Path) -> list[CheckpointOnDisk]:
    """Intact checkpoints of a run, by step. A resume passes over one whose files are not all there; so does this."""
    directory = run_dir / "checkpoints"
    if not directory.is_dir():
        return []
    found = []
    for path in directory.iterdir():
        match = _STEP_NAME.fullmatch(path.name)
        state = _state(path) if match else None
        if match is not None and state is not None:
            found.append(CheckpointOnDisk(path=path, step=int(match.group(1)), stated_step=state.get("step")))
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def _state(checkpoint: Path) -> dict[str, Any] | None:
    """What a checkpoint says about itself, or None if it, or a file it names, is not there in full."""
    try:
        state: dict[str, Any] = json.loads((checkpoint / _STATE_FILE).read_text(encoding="utf-8"))
        sizes: dict[str, int] = state.get("sizes", {})
        is_intact = all((checkpoint / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return None
    return state if is_intact else None


def check_order(steps: Sequence[TrainStep]) -> Iterator[Finding]:
    """Steps count from 1 without gaps, each trains the version before it, and only the last may be open."""
    for expected, step in enumerate(steps, start=1):
        for message in _step_faults(step, expected=expected, is_last=expected == len(steps)):
            yield Finding(check=Check.LEDGER, subject=f"step {step.step}", message=message)
    committed = [step for step in steps if step.committed_at is not None]
    for earlier, later in pairwise(committed):
        if later.planned_at is not None and earlier.planned_at is not None and later.planned_at < earlier.planned_at:
            message = f"planned before step {earlier.step}"
            yield Finding(check=Check.LEDGER, subject=f"step {later.step}", message=message)


def _step_faults(step: TrainStep, *, expected: int, is_last: bool) -> Iterator[str]:
    if step.step != expected:
        yield f"is number {expected} of the ledger: a step is missing"
    if step.policy_version != step.step - 1:
        yield f"trains v{step.policy_version}; step n trains version n - 1"
    if step.status is not StepStatus.COMMITTED and not is_last:
        yield "is only planned, but later steps exist"
    if step.status is StepStatus.COMMITTED and step.committed_at is None:
        yield "is committed without a time"
    if len(set(step.sequence_ids)) != len(step.sequence_ids):
        yield "names a row twice"
    if unknown := sorted(step.dropped.keys() - set(step.task_ids)):
        yield f"drops {unknown[0]}, which is not one of its groups"


def check_versions(
    ledger: LedgerFacts, *, policies: Sequence[PolicyVersion], latest: Mapping[int, TrainStep]
) -> Iterator[Finding]:
    """Version n is the weights after step n. `latest` is the ledger read after the policies."""
    published = {policy.version for policy in policies}
    for step in [] if ledger.is_supervised else ledger.committed:
        if step.step not in published:
            message = "is committed, but its policy version was never published"
            yield Finding(check=Check.LEDGER, subject=f"step {step.step}", message=message)
    for version in sorted(published):
        if version and version not in latest:
            message = "was published, but there is no such step"
            yield Finding(check=Check.LEDGER, subject=f"policy v{version}", message=message)


def check_checkpoints(
    ledger: LedgerFacts, *, checkpoints: Sequence[CheckpointOnDisk], latest: Mapping[int, TrainStep]
) -> Iterator[Finding]:
    """The newest checkpoint is of a step the ledger knows, and none that the ledger counts on is lost.

    A last step that is planned while its checkpoint exists is not finished, not wrong: a resume commits it.
    """
    for checkpoint in checkpoints:
        if checkpoint.stated_step != checkpoint.step:
            message = f"says it is of step {checkpoint.stated_step}"
            yield Finding(check=Check.LEDGER, subject=checkpoint.path.name, message=message)
    newest = checkpoints[-1].step if checkpoints else 0
    if checkpoints and newest not in latest:
        message = "is the newest checkpoint, but its step is not in the ledger"
        yield Finding(check=Check.LEDGER, subject=checkpoints[-1].path.name, message=message)
    elif checkpoints and latest[newest].status is not StepStatus.COMMITTED and newest != max(latest):
        message = "is the newest checkpoint, but its step is not committed and later ones exist"
        yield Finding(check=Check.LEDGER, subject=checkpoints[-1].path.name, message=message)
    expected = max((step.step for step in ledger.committed if step.checkpoint is not None), default=0)
    if expected > newest:
        message = f"has a checkpoint by the ledger, but the newest intact one on disk is of step {newest}"
        yield Finding(check=Check.LEDGER, subject=f"step {expected}", message=message)


def check_known(ledger: LedgerFacts, tally: RunTally, *, latest: Mapping[int, TrainStep]) -> Iterator[Finding]:
    """The ledger names only what exists, and every consumed group names a step that used it."""
    for task_id, steps in ledger.steps_of_task.items():
        if task_id not in tally.seen_tasks_of_ledger:
            message = f"step {steps[0]} uses this group, which is not in the store"
            yield Finding(check=Check.CONSUMPTION, subject=task_id, message=message)
    for row_id, steps in ledger.steps_of_row.items():
        if row_id not in tally.seen_rows_of_ledger and task_of_row(row_id) not in tally.seen_tasks_of_ledger:
            message = f"step {steps[0]} trains this row, which is not in the store"
            yield Finding(check=Check.CONSUMPTION, subject=row_id, message=message)
    for task_id, number in tally.consumed_later.items():
        step = latest.get(number)
        if step is None or task_id not in step.task_ids:
            message = f"consumed by step {number}, which {'is unknown' if step is None else 'does not name it'}"
            yield Finding(check=Check.CONSUMPTION, subject=task_id, message=message)


def check_sampled_versions(sampled: Mapping[int, str], policies: Sequence[PolicyVersion]) -> Iterator[Finding]:
    """Tokens come from weights that were announced. Before the first publication there is only the start model, v0."""
    published = {policy.version for policy in policies} or {0}
    for version, record_id in sorted(sampled.items()):
        if version not in published:
            message = f"has tokens of v{version}, which was never published"
            yield Finding(check=Check.POLICY_VERSIONS, subject=record_id, message=message)


def check_strays(records: Sequence[Record]) -> Iterator[Finding]:
    """Records that no Task accounts for: a second one of a generation, or of a Task that is not there."""
    for record in records:
        message = f"is a further Record of task {record.task_id}, generation {record.generation}, or of an unknown Task"
        yield Finding(check=Check.RECORD_IDENTITY, subject=record.id, message=message)


def check_readable(listed: Collection[str], read: Collection[str]) -> Iterator[Finding]:
    """What is listed can be read: nothing is ever deleted, so it is there and broken."""
    for subject in sorted(set(listed) - set(read)):
        yield Finding(check=Check.RECORD_IDENTITY, subject=subject, message="is in the store, but cannot be read")


def check_late_work(ids: Sequence[str], refused: Mapping[str, str], *, subject: str, what: str) -> Iterator[Finding]:
    """Nothing that was refused was used: `ids` are turns that a Record committed or a row holds.

    `refused` maps calls to their key in Quarantine.
    """
    for turn_id in ids:
        if turn_id in refused:
            message = f"{what} turn {turn_id}, which was refused: {refused[turn_id]}"
            yield Finding(check=Check.LATE_WORK, subject=subject, message=message)
