"""Looks at rows between database and model: the trainer never computes on what the audit would condemn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from accelerate.utils import gather_object

from agentrl.algo.row_faults import model_faults, row_faults
from agentrl.errors import TrainingError
from agentrl.types import DBRecordData

MAX_TOLD_FAULTS = 4


def first_faults(rows: Iterable[DBRecordData], *, find: Callable[[DBRecordData], Iterator[str]]) -> list[str]:
    """One line per row with which something is wrong: its id and the first thing that `find` names."""
    found = ((row.id, next(find(row), None)) for row in rows)
    return [f"row {row_id}: {fault}" for row_id, fault in found if fault is not None]


def faults_for_model(
    row: DBRecordData, *, is_supervised: bool, vocabulary_size: int, policy_version: int
) -> Iterator[str]:
    """What is wrong with a row in itself, else as something this model made; supervised rows may be of another run."""
    yield from row_faults(row, is_supervised=is_supervised)
    yield from model_faults(
        row, vocabulary_size=vocabulary_size, newest_version=None if is_supervised else policy_version
    )


def refuse_on_all_ranks(own: Sequence[str]) -> None:
    """Raise TrainingError, on every rank, with the faults that any rank found. Every rank must call it."""
    refuse(list(dict.fromkeys(gather_object(list(own)))))


def refuse(faults: Sequence[str]) -> None:
    """Raise TrainingError with these faults, if there are any."""
    if not faults:
        return
    more = len(faults) - MAX_TOLD_FAULTS
    raise TrainingError(
        "; ".join(faults[:MAX_TOLD_FAULTS])
        + (f"; and {more} more" if more > 0 else "")
        + ". The step was not made, weights are unchanged; agentrl audit and agentrl inspect say where rows are from"
    )
