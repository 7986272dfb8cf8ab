"""One claimed group on the in-memory store: Records that failed by infrastructure are sampled again, within a bound."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from agentrl.algo.suspects import engine_use, spoiled_by
from agentrl.chat import ChatFormat
from agentrl.config import InferenceConfig, RolloutConfig, RunConfig
from agentrl.errors import EngineError, EngineErrorKind
from agentrl.protocols import Toolbox
from agentrl.rollout.agent import Agent
from agentrl.rollout.groups import GroupRunner
from agentrl.rollout.sampler import MCPSampler
from agentrl.store import MemoryStore
from agentrl.tools import FunctionToolbox
from agentrl.types import (
    EngineQuarantine,
    EngineUse,
    GenerateReply,
    GenerateRequest,
    GroupOutcome,
    GroupSettlement,
    Record,
    RecordStatus,
    Recovery,
    StopReason,
    TaskClaim,
    ToolStatus,
    Turn,
)
from factories import make_task, make_turn
from scripted_engine import Script, ScriptedEngine
from tiny_chat import write_tiny_chat

CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
DOWN = EngineError("down", kind=EngineErrorKind.REJECTED)
TASK = make_task(num_generations=2, answer="5")


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat(tmp_path_factory.mktemp("chat"))


def add(a: int, b: int) -> str:
    """Sum of two integers."""
    return str(a + b)


def runner(
    model_dir: Path, store: MemoryStore, script: Script, *, toolbox: Toolbox | None = None, **rollout: object
) -> GroupRunner:
    settings = {"num_generations": 2, "max_new_tokens": 200, "max_prompt_tokens": 2000, **rollout}
    config = RunConfig(rollout=RolloutConfig.model_validate(settings), inference=InferenceConfig(context_length=4000))
    return GroupRunner(
        config=config,
        store=store,
        agent=Agent(
            chat=ChatFormat.load(model_dir),
            client=ScriptedEngine(model_dir, script),
            toolbox=toolbox or FunctionToolbox([add], recovery=Recovery.STATELESS),
            journal=store,
            commit_turn=store.commit_turn,
            rollout=config.rollout,
            inference=config.inference,
            tool_timeout_s=5.0,
            clock=lambda: datetime.now(UTC),
        ),
        sampler_class=MCPSampler,
        slots=asyncio.Semaphore(8),
    )


async def claim(store: MemoryStore) -> TaskClaim:
    await store.insert_tasks([TASK])
    (taken,) = await store.claim_tasks(split="train", owner="w", lease_s=60, limit=1)
    return taken


async def settlement_of(store: MemoryStore) -> GroupSettlement:
    settlement = await store.get_settlement(TASK.id)
    assert settlement is not None
    return settlement


async def records_of(store: MemoryStore) -> list[Record]:
    return sorted(await store.list_records(task_id=TASK.id), key=lambda record: record.generation)


class FailingAt:
    """A script: call the tool, then answer; the n-th requests for an answer fail, counted from 1."""

    def __init__(self, *failing: int, everything: bool = False) -> None:
        self.failing = set(failing)
        self.everything = everything
        self.num_answers = 0

    def __call__(self, context: str, depth: int) -> str | BaseException:
        if "<tool_response>" not in context:
            return CALL
        self.num_answers += 1
        return DOWN if self.everything or self.num_answers in self.failing else "<answer>5</answer>"


async def test_a_record_that_failed_by_infrastructure_is_sampled_again_from_the_start(model_dir: Path) -> None:
    store = MemoryStore()
    await runner(model_dir, store, FailingAt(1), resample_error_records=True).run(await claim(store))
    records = await records_of(store)
    assert [(record.status, record.score) for record in records] == [(RecordStatus.FINISHED, 1.0)] * 2
    assert sorted(record.attempt for record in records) == [1, 2]
    assert all(len(record.turn_ids) == 2 for record in records)
    assert (await settlement_of(store)).num_failed == 0
    (kept,) = await store.list_quarantined()
    again = next(record for record in records if record.attempt == 2)
    assert kept.key == f"attempt 1 of {again.id}"
    assert len(kept.ids) == 1  # the tool turn that was committed before the engine failed
    assert not set(kept.ids) & set(again.turn_ids)


async def test_without_the_setting_a_failed_record_is_a_failure(model_dir: Path) -> None:
    store = MemoryStore()
    await runner(model_dir, store, FailingAt(1)).run(await claim(store))
    assert [record.attempt for record in await records_of(store)] == [1, 1]
    assert (await settlement_of(store)).num_failed == 1
    assert await store.list_quarantined() == []


async def test_attempts_are_bounded_and_what_still_fails_stays_a_failure(model_dir: Path) -> None:
    store = MemoryStore()
    await runner(model_dir, store, FailingAt(everything=True), resample_error_records=True, max_record_attempts=3).run(
        await claim(store)
    )
    records = await records_of(store)
    assert [(record.status, record.attempt) for record in records] == [(RecordStatus.FAILED, 3)] * 2
    settlement = await settlement_of(store)
    assert (settlement.outcome, settlement.num_failed, settlement.rewards) == (GroupOutcome.DROPPED, 2, {})
    assert len(await store.list_quarantined()) == 4


async def test_what_the_policy_did_wrong_is_never_sampled_again(model_dir: Path) -> None:
    store = MemoryStore()
    wrong = runner(model_dir, store, lambda context, depth: "<answer>6</answer>", resample_error_records=True)
    await wrong.run(await claim(store))
    assert [(record.score, record.attempt) for record in await records_of(store)] == [(0.0, 1)] * 2


async def test_a_failure_its_owner_did_not_live_to_resample_is_resampled_by_the_next(model_dir: Path) -> None:
    store = MemoryStore()
    first = await claim(store)
    for record in await store.open_records(first):
        await store.finish_record(replace(record, status=RecordStatus.FAILED, stop_reason=StopReason.TIMEOUT))
    await store.release_claim(first)
    (second,) = await store.claim_tasks(split="train", owner="next", lease_s=60, limit=1)
    await runner(model_dir, store, FailingAt(), resample_error_records=True).run(second)
    assert [(record.score, record.attempt) for record in await records_of(store)] == [(1.0, 2)] * 2


class Quarantining:
    """A script whose first answer finds its engine's canaries wrong since ever; `is_healed`: and right from now on."""

    def __init__(self, store: MemoryStore, *, is_healed: bool) -> None:
        self.store = store
        self.is_healed = is_healed

    def __call__(self, context: str, depth: int) -> str:
        if "<tool_response>" not in context:
            return CALL
        until_s = datetime.now(UTC).timestamp() if self.is_healed else None
        self.store._quarantines.setdefault(
            "q",
            EngineQuarantine(
                id="q", service_id="scripted", policy_version=0, deviation=2.0, since_s=0.0, until_s=until_s
            ),
        )
        return "<answer>5</answer>"


async def test_a_record_a_quarantined_engine_sampled_is_sampled_again_from_the_start(model_dir: Path) -> None:
    store = MemoryStore()
    script = Quarantining(store, is_healed=True)
    await runner(model_dir, store, script, max_record_attempts=9).run(await claim(store))
    records = await records_of(store)
    assert [(record.status, record.score) for record in records] == [(RecordStatus.FINISHED, 1.0)] * 2
    again = next(record for record in records if record.attempt > 1)
    assert f"attempt 1 of {again.id}" in {work.key for work in await store.list_quarantined()}
    settlement = await settlement_of(store)
    assert settlement.num_failed == 0
    assert spoiled_by(settlement.engines, await store.list_engine_quarantines()) is None


async def test_records_of_an_engine_that_stays_quarantined_leave_the_baseline_as_failures(model_dir: Path) -> None:
    store = MemoryStore()
    await runner(model_dir, store, Quarantining(store, is_healed=False), max_record_attempts=2).run(await claim(store))
    records = await records_of(store)
    assert [(record.status, record.stop_reason) for record in records] == [
        (RecordStatus.FAILED, StopReason.ENGINE_ERROR)
    ] * 2
    assert all(record.error is not None and record.error.startswith("quarantined_engine") for record in records)
    settlement = await settlement_of(store)
    assert (settlement.num_failed, settlement.rewards, settlement.engines) == (2, {}, ())


async def test_a_settlement_says_which_engine_sampled_its_group_and_when(model_dir: Path) -> None:
    store = MemoryStore()
    before = datetime.now(UTC).timestamp()
    await runner(model_dir, store, FailingAt()).run(await claim(store))
    (use,) = (await settlement_of(store)).engines
    assert use.service_id == "scripted"
    assert before - 0.001 <= use.first_s <= use.last_s <= datetime.now(UTC).timestamp()


async def test_turns_carry_the_times_of_the_engines_own_clock(model_dir: Path) -> None:
    store = MemoryStore()
    running = runner(model_dir, store, FailingAt())
    engine = running.agent.client

    class Timed:
        async def generate(self, request: GenerateRequest) -> GenerateReply:
            reply = await engine.generate(request)
            return replace(reply, engine_times=(1000.0 + len(request.input_ids), 3000.25))

        async def close(self) -> None:
            """Nothing to release."""

    running.agent = replace(running.agent, client=Timed())
    await running.run(await claim(store))
    turns = [turn for record in await records_of(store) for turn in await store.load_turns(record)]
    first_s = min(engine_use(turn.model).first_s for turn in turns)
    assert 1000 < first_s < 3000
    assert (await settlement_of(store)).engines == (EngineUse(service_id="scripted", first_s=first_s, last_s=3000.25),)


# --- taken over by another process ---------------------------------------------------------------------------------


class Counting:
    """A tool with an effect outside: how often it was made, and what it answers."""

    def __init__(self, recovery: Recovery) -> None:
        self.num_calls = 0
        self.toolbox = FunctionToolbox([self.add], recovery=recovery)

    def add(self, a: int, b: int) -> str:
        """Sum of two integers."""
        self.num_calls += 1
        return f"{a + b}, receipt {self.num_calls}"


class Dying:
    """A script that calls the tool, and whose process dies (is cancelled) when asked for more."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    def __call__(self, context: str, depth: int) -> str | BaseException:
        if "<tool_response>" not in context:
            return CALL
        self.asked.set()
        return asyncio.CancelledError()


async def die_after_the_first_turn(model_dir: Path, store: MemoryStore, toolbox: Toolbox) -> None:
    """A claim whose worker committed one turn with one call for its only Record and then was gone."""
    await store.insert_tasks([make_task(num_generations=1, answer="5")])
    (first,) = await store.claim_tasks(split="train", owner="dying", lease_s=60, limit=1)
    with contextlib.suppress(asyncio.CancelledError):
        await runner(model_dir, store, Dying(), toolbox=toolbox).run(first)
    (record,) = await records_of(store)
    assert (len(record.turn_ids), record.status) == (1, RecordStatus.RUNNING)
    await store.release_claim(first)


async def take_over(model_dir: Path, store: MemoryStore, toolbox: Toolbox) -> tuple[Record, ScriptedEngine]:
    (second,) = await store.claim_tasks(split="train", owner="successor", lease_s=60, limit=1)
    successor = runner(model_dir, store, FailingAt(), toolbox=toolbox)
    await successor.run(second)
    (record,) = await records_of(store)
    assert (record.score, record.fence) == (1.0, second.fence)
    assert isinstance(successor.agent.client, ScriptedEngine)
    return record, successor.agent.client


@pytest.mark.parametrize("recovery", [Recovery.STATELESS, Recovery.JOURNALLED])
async def test_a_record_whose_sampler_died_goes_on_from_its_last_turn_if_its_tools_allow_it(
    model_dir: Path, recovery: Recovery
) -> None:
    store, tool = MemoryStore(), Counting(recovery)
    await die_after_the_first_turn(model_dir, store, tool.toolbox)
    record, engine = await take_over(model_dir, store, tool.toolbox)
    assert (record.attempt, len(record.turn_ids), len(engine.requests)) == (1, 2, 1)
    assert tool.num_calls == 1
    assert await store.list_quarantined() == []


async def test_a_record_that_used_a_stateful_tool_starts_over_and_its_old_turns_are_kept(model_dir: Path) -> None:
    store, tool = MemoryStore(), Counting(Recovery.STATEFUL)
    await die_after_the_first_turn(model_dir, store, tool.toolbox)
    record, engine = await take_over(model_dir, store, tool.toolbox)
    assert (record.attempt, len(record.turn_ids), len(engine.requests)) == (2, 2, 2)
    assert tool.num_calls == 2
    (kept,) = await store.list_quarantined()
    assert kept.key == f"attempt 1 of {record.id}"
    assert "taken over at fence 2 after using add" in kept.reason
    assert not set(kept.ids) & set(record.turn_ids)


async def test_a_record_that_used_a_tool_which_is_no_longer_there_starts_over(model_dir: Path) -> None:
    store, tool = MemoryStore(), Counting(Recovery.STATELESS)
    await die_after_the_first_turn(model_dir, store, tool.toolbox)

    def other() -> str:
        """Something else."""
        return ""

    record, _ = await take_over(model_dir, store, FunctionToolbox([other], recovery=Recovery.STATELESS))
    assert record.attempt == 2


async def test_a_record_that_has_used_no_tool_yet_goes_on_even_where_all_tools_are_stateful(model_dir: Path) -> None:
    store, tool = MemoryStore(), Counting(Recovery.STATEFUL)
    await store.insert_tasks([make_task(num_generations=1, answer="5")])
    (first,) = await store.claim_tasks(split="train", owner="dying", lease_s=60, limit=1)
    (record,) = await store.open_records(first)
    turn = make_turn(record, text="<think>nothing</think>", tool_results=["no such tool"])
    refused = replace(turn.tools[0], target="nope", status=ToolStatus.UNKNOWN_TOOL.value)
    await store.commit_turn(record, replace(turn, tools=(refused,)))
    await store.release_claim(first)
    record, _ = await take_over(model_dir, store, tool.toolbox)
    assert record.attempt == 1


async def test_a_journalled_call_that_was_executed_is_not_executed_again_by_the_successor(model_dir: Path) -> None:
    """The predecessor dies between the call and the commit of its turn; the journal has the result."""
    store, tool = MemoryStore(), Counting(Recovery.JOURNALLED)
    await store.insert_tasks([make_task(num_generations=1, answer="5")])
    (first,) = await store.claim_tasks(split="train", owner="dying", lease_s=60, limit=1)
    dying = runner(model_dir, store, FailingAt(), toolbox=tool.toolbox)

    async def die(record: Record, turn: Turn) -> Record:
        raise asyncio.CancelledError

    dying.agent = replace(dying.agent, commit_turn=die)
    with contextlib.suppress(asyncio.CancelledError):
        await dying.run(first)
    (record,) = await records_of(store)
    assert (tool.num_calls, record.turn_ids) == (1, ())
    await store.release_claim(first)
    record, _ = await take_over(model_dir, store, tool.toolbox)
    assert tool.num_calls == 1
    turns = await store.load_turns(record)
    assert [call.response["content"] for turn in turns for call in turn.tools] == ["5, receipt 1"]


async def test_a_restarted_record_finds_the_journalled_calls_of_its_earlier_attempt(model_dir: Path) -> None:
    store, tool = MemoryStore(), Counting(Recovery.JOURNALLED)
    await store.insert_tasks([make_task(num_generations=1, answer="5")])
    (only,) = await store.claim_tasks(split="train", owner="w", lease_s=60, limit=1)
    await runner(model_dir, store, FailingAt(1), toolbox=tool.toolbox, resample_error_records=True).run(only)
    (record,) = await records_of(store)
    assert (record.attempt, record.score, tool.num_calls) == (2, 1.0, 1)
