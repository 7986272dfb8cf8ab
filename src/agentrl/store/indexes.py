"""Collection names and index declarations, as data.

Every query of the store is either by `_id`, or equality on a prefix of one of these indexes plus at most one range on
the field that follows it. MongoDB and the embedded server both answer that form without scanning the collection.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pymongo import ASCENDING, IndexModel

TASK: Final = "Task"
SPLIT: Final = "Split"  # the epochs of each split, for claims in order
RECORD: Final = "Record"
DISPATCH: Final = "DispatchedSamplingTask"
SEQUENCE: Final = "DBRecordData"
TOKEN_PART: Final = "TokenPart"
TRAIN_STEP: Final = "TrainStep"
POLICY_VERSION: Final = "PolicyVersion"
SERVICE: Final = "InferenceService"
WORKER: Final = "Worker"
RUN: Final = "Run"
QUARANTINE: Final = "Quarantine"
ENGINE_QUARANTINE: Final = "EngineQuarantine"
SCORE: Final = "Score"  # scores beside a Record's own, by version of the scorer: see scores.py
JUDGE_VERDICT: Final = "JudgeVerdict"
IMPORT: Final = "Import"  # one document while an import is under way: see archive.py
TOOL_JOURNAL: Final = "ToolJournal"
ACCOUNT: Final = "Account"  # what the run has spent: see account.py
JOURNAL_BARRIER: Final = "JournalBarrier"  # one document per process: see turns.py


def _index(*fields: str) -> IndexModel:
    return IndexModel([(field, ASCENDING) for field in fields], name="_".join(fields))


INDEXES: Final[Mapping[str, tuple[IndexModel, ...]]] = {
    TASK: (
        _index("split", "status", "slot"),  # claim
        _index("split", "status", "lease_until"),  # reap
        _index("split", "status", "settled_at"),  # plan
        _index("split", "epoch"),  # the next epoch copies the first
    ),
    RECORD: (_index("split", "started_at"),),
    DISPATCH: (_index("turn_id"),),
    SCORE: (_index("version"),),
    SEQUENCE: (_index("split"),),
    TRAIN_STEP: (_index("task_ids"),),
    POLICY_VERSION: (_index("version"),),
    TOOL_JOURNAL: (_index("content_hash"),),
}
