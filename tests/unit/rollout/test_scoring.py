"""Records meet their scorer: format without an answer, judges that fail, calls that are kept."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from agentrl.algo.settle import settle_group
from agentrl.chat import ChatFormat
from agentrl.config import InferenceConfig, RolloutConfig
from agentrl.config.sections import AlgoConfig
from agentrl.rollout.agent import Agent
from agentrl.rollout.sampler import MCPSampler
from agentrl.rollout.scoring import RecordScorer
from agentrl.scoring import ScoringContext
from agentrl.store.memory import MemoryStore
from agentrl.tools import FunctionToolbox
from agentrl.types import Record, RecordStatus, StopReason, Task, Turn
from chat_server import Behaviour, Status, chat_server
from factories import make_record, make_task
from judges import judge_for
from scripted_engine import ScriptedEngine
from tiny_chat import write_tiny_chat

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
TASK = make_task("q", query="2+3?", answer="5")
RECORD = make_record(TASK)


def add(a: int, b: int) -> str:
    """Sum of two integers."""
    return str(a + b)


def make_agent(model_dir: Path, texts: tuple[str, ...], *, scoring: RecordScorer | None = None) -> Agent:
    """An agent whose n-th completion is the n-th text."""

    async def commit(record: Record, turn: Turn) -> Record:
        return replace(record, turn_ids=(*record.turn_ids, turn.model.id))

    return Agent(
        chat=ChatFormat.load(model_dir),
        client=ScriptedEngine(model_dir, lambda context, depth: texts[min(depth, len(texts) - 1)]),
        toolbox=FunctionToolbox([add]),
        commit_turn=commit,
        journal=MemoryStore(),
        rollout=RolloutConfig(max_new_tokens=400, max_prompt_tokens=3000, max_turns=2),
        inference=InferenceConfig(context_length=4000),
        tool_timeout_s=5.0,
        clock=lambda: datetime.now(UTC),
        scoring=scoring or RecordScorer(),
    )


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat(tmp_path_factory.mktemp("chat"))


async def sample(agent: Agent, *, scorer: str) -> tuple[Record, tuple[Turn, ...]]:
    task: Task = replace(TASK, scorer=scorer)
    return await MCPSampler(task, record=RECORD, committed=(), agent=agent).sample()


async def judged(
    model_dir: Path, behave: Behaviour, store: MemoryStore, *, texts: tuple[str, ...]
) -> tuple[Record, tuple[Turn, ...]]:
    async with chat_server(behave) as server, judge_for([server.url], store) as judge:
        scoring = RecordScorer(context=ScoringContext(judge=judge), store=store)
        return await sample(make_agent(model_dir, texts, scoring=scoring), scorer="agentcpm")


async def test_good_calls_count_without_an_answer_too(model_dir: Path) -> None:
    agent = make_agent(model_dir, (CALL, "hm"))
    record, _ = await sample(agent, scorer="0.9*gaia + 0.1*format")
    assert (record.answer, record.stop_reason, record.score) == (None, StopReason.MAX_TURNS, 0.1)
    agent = make_agent(model_dir, (CALL, "<answer>5</answer>"))
    record, _ = await sample(agent, scorer="0.9*gaia + 0.1*format if gaia")
    assert record.score == 1.0


async def test_a_judge_call_is_kept_on_the_record(model_dir: Path) -> None:
    store = MemoryStore()
    record, turns = await judged(model_dir, lambda request: "Correct", store, texts=("<answer>five</answer>",))
    assert (record.status, record.score, len(turns[0].tools)) == (RecordStatus.FINISHED, 1.0, 0)
    [call] = await store.list_calls(record.id)
    assert (call.kind, call.target, call.status) == ("judge", "judge-0", "ok")
    assert call.response["prompt_tokens"] == 11


async def test_a_limit_that_was_hit_is_not_sent_to_the_judge(model_dir: Path) -> None:
    store = MemoryStore()
    record, _ = await judged(model_dir, lambda request: "Correct", store, texts=("hm", "hm hm"))
    assert (record.stop_reason, record.score) == (StopReason.MAX_TURNS, 0.0)
    assert await store.list_calls(record.id) == []


@pytest.mark.parametrize("fault", [Status(500), "no idea"], ids=["outage", "junk"])
async def test_a_judge_that_fails_leaves_a_typed_failure_without_a_score(model_dir: Path, fault: Status | str) -> None:
    store = MemoryStore()
    record, turns = await judged(model_dir, lambda request: fault, store, texts=("<answer>five</answer>",))
    assert (record.status, record.stop_reason, record.score) == (RecordStatus.FAILED, StopReason.JUDGE_ERROR, None)
    assert record.answer == "five"
    assert await store.list_calls(record.id) != []
    right = replace(record, id="train:0:q/g1", generation=1, status=RecordStatus.FINISHED, score=1.0, error=None)
    right = replace(right, stop_reason=StopReason.ANSWER)
    settlement, _ = settle_group(
        TASK, [record, right], {record.id: turns, right.id: turns}, algo=AlgoConfig(), min_turns=0
    )
    assert (settlement.num_failed, settlement.rewards) == (1, {right.id: 1.0})
