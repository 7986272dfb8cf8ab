"""Which settlements fit the scores a run trains on, and how a version of a scorer sees a group."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentrl.algo.score_versions import is_wanted, scorer_of, with_scores
from agentrl.algo.settle import is_scored, settle_group
from agentrl.config import AlgoConfig
from agentrl.types import EpisodeResult, RecordStatus, Score, StopReason
from factories import make_record, make_task, make_turn

VERSION = "agentcpm @00000001"


@pytest.mark.parametrize(
    ("version", "wanted", "expected"),
    [
        (None, None, True),
        (VERSION, None, False),
        (None, "agentcpm", False),
        (VERSION, "agentcpm", True),
        (VERSION, VERSION, True),
        (VERSION, "agentcpm @00000002", False),
        (VERSION, "agent", False),
        ("0.9*gaia + 0.1*format @00000001", " 0.9*gaia  + 0.1*format", True),
    ],
)
def test_a_scorer_stands_for_all_its_versions_and_a_version_for_itself(
    version: str | None, wanted: str | None, expected: bool
) -> None:
    assert is_wanted(version, wanted=wanted) is expected


def test_the_scorer_of_a_version_is_spelled_as_versions_are() -> None:
    assert scorer_of("0.5*em  +  0.5*f1 @00000001") == scorer_of("0.5*em + 0.5*f1") == "0.5*em + 0.5*f1"


def test_a_group_is_settled_with_the_scores_of_the_version_and_its_rows_say_so() -> None:
    task = make_task(num_generations=4)
    finished = {"status": RecordStatus.FINISHED, "stop_reason": StopReason.ANSWER, "score": 1.0}
    records = [make_record(task, generation=g, **finished) for g in range(4)]
    records[1] = replace(records[1], turn_scores=(0.5,))
    records[2] = replace(records[2], status=RecordStatus.FAILED, stop_reason=StopReason.JUDGE_ERROR, score=None)
    unscored = replace(records[3], status=RecordStatus.FAILED, stop_reason=StopReason.ENGINE_ERROR, score=None)
    scores = {records[0].id: 0.0, records[1].id: 1.0, records[2].id: 1.0, unscored.id: 1.0}
    found = {record_id: score_of(record_id, value) for record_id, value in scores.items()}
    seen = with_scores([*records[:3], unscored], found, version=VERSION)
    assert [(record.score, is_scored(record)) for record in seen] == [
        (0.0, True),
        (1.0, True),
        (1.0, True),
        (None, False),
    ]
    assert [record.turn_scores for record in seen] == [()] * 4
    turns = {record.id: (make_turn(record),) for record in seen}
    settlement, rows = settle_group(task, seen, turns, algo=AlgoConfig(), min_turns=0, score_version=VERSION)
    assert settlement.scores == {record.id: scores[record.id] for record in records[:3]}
    assert (settlement.num_failed, settlement.score_version) == (1, VERSION)
    assert {row.score_version for row in rows} == {VERSION}
    assert [row.reward for row in rows] == [0.0, 1.0, 1.0]


def score_of(record_id: str, value: float, *episode_values: float) -> Score:
    return Score(
        record_id=record_id, attempt=1, version=VERSION, scorer="agentcpm", value=value, episode_values=episode_values
    )  # fmt: skip


def episode(answer: str | None, *, num_turns: int = 1) -> EpisodeResult:
    stop_reason = StopReason.CONTEXT_LIMIT if answer is None else StopReason.ANSWER
    return EpisodeResult(
        answer=answer, score=None, stop_reason=stop_reason, num_turns=num_turns, num_tool_calls=0,
        num_completion_tokens=2 * num_turns,
    )  # fmt: skip


def test_each_episode_of_a_meta_episode_has_its_score_of_the_version() -> None:
    unjudged = replace(
        make_record(status=RecordStatus.FAILED, stop_reason=StopReason.JUDGE_ERROR),
        episodes=(episode("a", num_turns=2), episode("b"), episode(None, num_turns=0)),
    )
    [seen] = with_scores([unjudged], {unjudged.id: score_of(unjudged.id, 0.0, 0.25, 1.0, 0.0)}, version=VERSION)
    assert [found.score for found in seen.episodes] == [0.25, 1.0, 0.0]
    assert (seen.turn_scores, seen.score) == ((None, 0.25, 1.0), 0.0)
    assert (seen.status, seen.stop_reason) == (RecordStatus.FINISHED, StopReason.CONTEXT_LIMIT)
    [as_a_whole] = with_scores([unjudged], {unjudged.id: score_of(unjudged.id, 1.0)}, version=VERSION)
    assert not is_scored(as_a_whole), "a version that scored only its last answer says nothing of its episodes"


def test_a_record_the_version_has_not_scored_leaves_the_baseline() -> None:
    record = make_record(status=RecordStatus.FINISHED, stop_reason=StopReason.ANSWER, score=1.0)
    [seen] = with_scores([record], {}, version=VERSION)
    assert not is_scored(seen)
