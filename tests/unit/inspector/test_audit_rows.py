from __future__ import annotations

from dataclasses import replace

import numpy as np

from agentrl.algo.settle import settle_group
from agentrl.config.sections import AlgoConfig
from agentrl.inspector.audit_rows import check_row_totals
from agentrl.types import DBRecordData, Record, RecordStatus, StopReason
from factories import make_record, make_task, make_turn

TASK = make_task()


def scored(generation: int, *turn_scores: float) -> Record:
    record = make_record(
        TASK,
        generation=generation,
        status=RecordStatus.FINISHED,
        stop_reason=StopReason.ANSWER,
        score=turn_scores[-1],
    )
    return replace(record, turn_scores=turn_scores)


def rows_of_turns() -> list[DBRecordData]:
    """Two Records of two episodes each, with another advantage in every episode."""
    records = [scored(0, 0.0, 1.0), scored(1, 1.0, 0.0)]
    turns = {record.id: [make_turn(record, index=index) for index in range(2)] for record in records}
    algo = AlgoConfig(advantage="turn_rloo", gamma=0.5)
    return settle_group(TASK, records, turns, algo=algo, min_turns=0)[1]


def test_rows_with_an_advantage_per_turn_are_accepted() -> None:
    for row in rows_of_turns():
        assert len(set(row.advantages[row.loss_mask].tolist())) == 2
        assert not list(check_row_totals(row, summary=row.summary, reward=row.reward, expected=row))


def test_an_advantage_moved_to_another_turn_is_found() -> None:
    row = rows_of_turns()[0]
    credit = row.advantages[row.loss_mask]
    moved = row.advantages.copy()
    moved[row.loss_mask] = credit[::-1]
    forged = replace(row, advantages=moved)
    (finding,) = check_row_totals(forged, summary=row.summary, reward=row.reward, expected=row)
    assert "4 trained tokens do not have their advantage" in finding.message
    assert f"recomputed {np.float32(credit[0]):.6g}" in finding.message
