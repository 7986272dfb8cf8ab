"""The ledger's nouns: an optimizer step, and what was found wrong after it. Import them from `agentrl.types`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum


class StepStatus(StrEnum):
    """Life of a TrainStep: the plan is written first, the commit comes with weights and metrics."""

    PLANNED = "planned"
    COMMITTED = "committed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """Something the stability watch found wrong after a step (`algo/watch.py`)."""

    name: str
    message: str
    steps: tuple[int, ...]  # whose numbers gave the alarm
    subjects: tuple[str, ...]  # ids of Records that look like the cause, or of Tasks where whole groups do


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStep:
    """The ledger entry of one optimizer step: exactly what it trains, and what came of it."""

    step: int  # from 1; publishes policy version `step`
    status: StepStatus
    policy_version: int  # the version being trained: step - 1
    task_ids: tuple[str, ...]  # groups consumed by this step, dropped ones included
    sequence_ids: tuple[str, ...]  # DBRecordData rows trained
    dropped: Mapping[str, str] = field(default_factory=dict)  # task id -> named reason
    retained: tuple[str, ...] = ()  # groups that may be trained again: this step does not consume them
    score_versions: Mapping[str, str] = field(default_factory=dict)  # task id -> version, where it is not its own score
    metrics: Mapping[str, float] = field(default_factory=dict)
    alarms: tuple[Alarm, ...] = ()
    attempts: int = 1  # times this plan was executed (a resume replays it)
    planned_at: datetime | None = None
    committed_at: datetime | None = None
    checkpoint: str | None = None
