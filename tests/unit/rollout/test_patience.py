"""Rollouts that are done while their judge is away: judged again, for a bounded time, from what is committed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.rollout import MCPSampler
from agentrl.rollout import patience as patience_module
from agentrl.rollout.groups import GroupRunner
from agentrl.rollout.patience import Patience
from agentrl.rollout.scoring import RecordScorer
from agentrl.scoring import ScoringContext
from agentrl.store import MemoryStore
from agentrl.types import GroupOutcome, Record, RecordStatus, StopReason
from chat_server import Status, chat_server
from factories import make_task
from group_run import claim_task, make_agent, make_config
from judges import judge_for
from scripted_engine import ScriptedEngine
from tiny_chat import write_tiny_chat

TASK = replace(make_task("q", num_generations=2, query="2+3?", answer="5"), scorer="agentcpm")
DOWN = Status(503)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat(tmp_path_factory.mktemp("chat"))


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience_module, "SHORTEST_PAUSE_S", 0.01)


def guesses(context: str, depth: int) -> str:
    """The first Record of the group is right, the second one is not."""
    return f"<answer>{'five' if depth == 0 else 'six'}</answer>"


def verdict(request: dict) -> str:
    return "Correct" if '"five"' in request["messages"][1]["content"] else "Incorrect"


@asynccontextmanager
async def runner_with(behave: Callable, *, store: MemoryStore, engine: ScriptedEngine, **rollout: object):
    """A runner of one slot, its judge behind HTTP."""
    config = make_config(**rollout)
    async with chat_server(behave) as server, judge_for([server.url], store) as judge:
        scoring = RecordScorer(context=ScoringContext(judge=judge), store=store)
        agent = replace(make_agent(config, store=store, engine=engine), scoring=scoring)
        slots = asyncio.Semaphore(1)
        yield GroupRunner(config=config, store=store, agent=agent, sampler_class=MCPSampler, slots=slots)


async def records_of(store: MemoryStore) -> list[Record]:
    return sorted(await store.list_records(task_id=TASK.id), key=lambda record: record.generation)


async def test_a_judge_that_was_down_costs_no_record_and_holds_up_no_other(model_dir: Path) -> None:
    store, engine = MemoryStore(), ScriptedEngine(model_dir, guesses)

    def until_both_are_sampled(request: dict) -> str | Status:  # with one slot, so none is held while waiting
        return verdict(request) if len(engine.requests) == 2 and request["attempt"] > 8 else DOWN

    claim = await claim_task(store, TASK)
    async with runner_with(until_both_are_sampled, store=store, engine=engine) as runner:
        await asyncio.wait_for(runner.run(claim), 20)
    records = await records_of(store)
    assert [(record.status, record.stop_reason) for record in records] == [
        (RecordStatus.FINISHED, StopReason.ANSWER)
    ] * 2
    assert sorted(record.score for record in records) == [0.0, 1.0]
    settlement = await store.get_settlement(TASK.id)
    assert settlement is not None
    assert (settlement.outcome, settlement.num_failed) == (GroupOutcome.TRAINABLE, 0)
    assert len(engine.requests) == 2
    assert "overloaded" in {call.status for record in records for call in await store.list_calls(record.id)}


async def test_when_the_patience_is_over_the_group_goes_on_without_its_verdicts(model_dir: Path) -> None:
    store, engine = MemoryStore(), ScriptedEngine(model_dir, guesses)
    claim = await claim_task(store, TASK)
    async with runner_with(lambda request: DOWN, store=store, engine=engine, judge_patience_s=0.05) as runner:
        await asyncio.wait_for(runner.run(claim), 20)
    assert [record.stop_reason for record in await records_of(store)] == [StopReason.JUDGE_ERROR] * 2
    settlement = await store.get_settlement(TASK.id)
    assert settlement is not None
    assert (settlement.drop_reason, settlement.num_failed) == ("too_few_scored", 2)


async def test_a_sampler_that_dies_while_it_waits_leaves_the_verdicts_to_the_next_one(model_dir: Path) -> None:
    store, engine = MemoryStore(), ScriptedEngine(model_dir, guesses)
    asked = asyncio.Event()

    def down(request: dict) -> Status:
        if request["attempt"] > 8:
            asked.set()
        return DOWN

    claim = await claim_task(store, TASK)
    async with runner_with(down, store=store, engine=engine) as runner:
        running = asyncio.create_task(runner.run(claim))
        await asyncio.wait_for(asked.wait(), 20)
        running.cancel()
        await asyncio.wait([running])
    await store.release_claim(claim)
    [again] = await store.claim_tasks(split="train", owner="second", lease_s=60, limit=1)
    async with runner_with(verdict, store=store, engine=engine) as runner:
        await asyncio.wait_for(runner.run(again), 20)
    assert sorted(record.score for record in await records_of(store)) == [0.0, 1.0]
    assert len(engine.requests) == 2


async def test_a_judge_that_answers_nonsense_is_not_waited_for(model_dir: Path) -> None:
    store, engine = MemoryStore(), ScriptedEngine(model_dir, guesses)
    claim = await claim_task(store, TASK)
    async with runner_with(lambda request: "no idea", store=store, engine=engine) as runner:
        await asyncio.wait_for(runner.run(claim), 5)
    assert [record.stop_reason for record in await records_of(store)] == [StopReason.JUDGE_ERROR] * 2


async def test_pauses_grow_and_end_with_the_limit() -> None:
    patience = Patience(limit_s=0.1)
    started = asyncio.get_running_loop().time()
    num_pauses = 0
    while await patience.wait():
        num_pauses += 1
    assert 3 <= num_pauses <= 8
    assert asyncio.get_running_loop().time() - started < 5
