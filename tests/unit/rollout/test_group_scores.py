"""Groups settled with scores that stand beside the Records' own: taken from the store, or made now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from agentrl.config import AlgoConfig, RolloutConfig, RunConfig
from agentrl.errors import BudgetSpentError, ConfigError
from agentrl.rollout import patience as patience_module
from agentrl.rollout.group_scores import GroupScores
from agentrl.rollout.scoring import RecordScorer
from agentrl.scoring import MCPScorerFactory, ScoringContext
from agentrl.store import MemoryStore
from agentrl.types import Record, RecordStatus, Score, StopReason, Turn
from chat_server import Status, chat_server
from factories import make_record, make_task
from judges import judge_for

TASK = make_task("q", num_generations=3, query="2+3?", answer="5")
RECORDS = tuple(
    make_record(
        TASK, generation=g, status=RecordStatus.FINISHED, stop_reason=StopReason.ANSWER, score=0.0, answer=answer
    )
    for g, answer in enumerate(("five", "six", "seven"))
)
FINISHED: Sequence[tuple[Record, Sequence[Turn]]] = [(record, ()) for record in RECORDS]


def config_with(version: str | None, *, patience_s: float = 5.0) -> RunConfig:
    return RunConfig(
        algo=AlgoConfig(score_version=version),
        rollout=RolloutConfig(num_generations=3, judge_patience_s=patience_s),
    )


def rules(version: str | None, store: MemoryStore) -> GroupScores | None:
    return GroupScores.from_config(config_with(version), scoring=RecordScorer(), store=store)


def verdict(request: dict) -> str:
    return "Correct" if '"five"' in request["messages"][1]["content"] else "Incorrect"


def test_without_a_version_the_records_keep_their_own_scores() -> None:
    assert rules(None, MemoryStore()) is None


def test_a_version_this_configuration_does_not_make_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"makes 'em @[0-9a-f]{8}'; restore them, or set score_version = 'em'"):
        rules("em @00000000", MemoryStore())
    with pytest.raises(ConfigError, match="unknown scorer"):
        rules("agentcmp", MemoryStore())
    with pytest.raises(ConfigError, match="agent_config_path"):
        rules("agentcpm", MemoryStore())


async def test_scores_that_are_there_are_taken_and_missing_ones_made() -> None:
    store = MemoryStore()
    version = MCPScorerFactory.version("em", judge=None)
    await store.put_score(Score(record_id=RECORDS[0].id, attempt=1, version=version, scorer="em", value=0.75))
    scores = rules(version, store)
    assert scores is not None
    seen = await scores.of_group(TASK, FINISHED, tools=())
    assert [record.score for record in seen] == [0.75, 0.0, 0.0]
    assert len(await store.find_scores(RECORDS, version=version)) == 3


async def test_a_judge_that_is_down_is_waited_for_and_one_that_stays_down_leaves_records_without_a_score(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(patience_module, "SHORTEST_PAUSE_S", 0.01)
    store = MemoryStore()

    def down_for_a_while(request: dict) -> str | Status:
        return verdict(request) if request["attempt"] > 12 else Status(503)

    for behave, patience_s, expected in (
        (lambda request: Status(503), 0.05, [None, None, None]),
        (down_for_a_while, 20.0, [1.0, 0.0, 0.0]),
    ):
        async with chat_server(behave) as server, judge_for([server.url], store) as judge:
            scoring = RecordScorer(context=ScoringContext(judge=judge), store=store)
            config = config_with("agentcpm", patience_s=patience_s)
            scores = GroupScores.from_config(config, scoring=scoring, store=store)
            assert scores is not None
            unjudged = replace(RECORDS[0], status=RecordStatus.FAILED, stop_reason=StopReason.JUDGE_ERROR, score=None)
            seen = await scores.of_group(TASK, [(unjudged, ()), *FINISHED[1:]], tools=())
        assert [record.score for record in seen] == expected


async def test_a_budget_that_is_used_up_is_raised_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*args: object, **kwargs: object) -> None:
        raise BudgetSpentError("no money")

    scores = rules("em", MemoryStore())
    assert scores is not None
    monkeypatch.setattr(RecordScorer, "score", refuse)
    with pytest.raises(BudgetSpentError):
        await scores.of_group(TASK, FINISHED, tools=())
