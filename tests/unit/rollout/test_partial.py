"""Partial rollouts: Records put down at their cap and picked up under the next policy version."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from agentrl.chat import ChatFormat
from agentrl.config import AlgoConfig, InferenceConfig, RolloutConfig, RunConfig
from agentrl.rollout.agent import Agent
from agentrl.rollout.groups import GroupRunner
from agentrl.rollout.partial import LegLimits
from agentrl.rollout.sampler import MCPSampler
from agentrl.store import MemoryStore
from agentrl.tools import FunctionToolbox
from agentrl.types import PolicyVersion, RecordStatus, Recovery, StopReason, TaskClaim, Turn
from factories import make_record, make_task, make_turn
from scripted_engine import ScriptedEngine
from tiny_chat import write_tiny_chat

LONG = make_task("long", num_generations=2, answer="5", query="long: 2+3?")
SHORT = make_task("short", num_generations=2, answer="5", query="short: 2+3?")


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat(tmp_path_factory.mktemp("chat"))


def add(a: int, b: int) -> str:
    """Sum of two integers."""
    return str(a + b)


def script(context: str, depth: int) -> str:
    """Long Tasks take five turns, the others one."""
    done = context.count("<tool_response>")
    if "short" in context or done == 4:
        return "<answer>5</answer>"
    return f'{done} <tool_call>{{"name": "add", "arguments": {{"a": 2, "b": 3}}}}</tool_call>'


def make_runner(
    model_dir: Path, store: MemoryStore, *, recovery: Recovery = Recovery.STATELESS, slots: int = 8, **rollout: object
) -> GroupRunner:
    settings = {"num_generations": 2, "max_new_tokens": 200, "max_prompt_tokens": 3000, "partial_rollout_tokens": 100}
    config = RunConfig(
        rollout=RolloutConfig.model_validate(settings | rollout),
        inference=InferenceConfig(context_length=4000),
        algo=AlgoConfig(max_staleness=2),
    )
    agent = Agent(
        chat=ChatFormat.load(model_dir),
        client=ScriptedEngine(model_dir, script),
        toolbox=FunctionToolbox([add], recovery=recovery),
        journal=store,
        commit_turn=store.commit_turn,
        rollout=config.rollout,
        inference=config.inference,
        tool_timeout_s=5.0,
        clock=lambda: datetime.now(UTC),
    )
    return GroupRunner(
        config=config, store=store, agent=agent, sampler_class=MCPSampler, slots=asyncio.Semaphore(slots)
    )


async def claim(store: MemoryStore) -> TaskClaim:
    (taken,) = await store.claim_tasks(split="train", owner="w", lease_s=60, limit=1)
    return taken


async def until_put_down(runner: GroupRunner, *, number: int) -> None:
    async with asyncio.timeout(10):
        while runner.put_down.num_waiting < number:
            await asyncio.sleep(0.001)


async def publish(store: MemoryStore, runner: GroupRunner, version: int) -> None:
    await store.publish_policy(PolicyVersion(version=version, path=f"v{version}"))
    runner.agent.client.version = version  # type: ignore[attr-defined]  # ScriptedEngine


async def turns_of(store: MemoryStore) -> list[list[Turn]]:
    return [await store.load_turns(record) for record in await store.list_records(task_id=LONG.id)]


async def test_a_record_at_its_cap_goes_on_under_the_next_version_with_the_version_of_each_token(
    model_dir: Path,
) -> None:
    store = MemoryStore()
    await store.insert_tasks([LONG])
    runner = make_runner(model_dir, store)
    await publish(store, runner, 0)
    running = asyncio.create_task(runner.run(await claim(store)))
    await until_put_down(runner, number=2)
    assert [len(turns) for turns in await turns_of(store)] == [2, 2]
    await publish(store, runner, 1)
    async with asyncio.timeout(10):
        while [len(turns) for turns in await turns_of(store)] != [4, 4]:
            await asyncio.sleep(0.001)
    await until_put_down(runner, number=2)
    await publish(store, runner, 2)
    await asyncio.wait_for(running, 10)
    for record in await store.list_records(task_id=LONG.id):
        assert (record.status, record.stop_reason, record.score) == (RecordStatus.FINISHED, StopReason.ANSWER, 1.0)
        turns = await store.load_turns(record)
        assert [turn.tokens.version_spans[0].version for turn in turns] == [0, 0, 1, 1, 2]


async def test_the_slot_of_a_record_that_was_put_down_samples_another_group(model_dir: Path) -> None:
    store = MemoryStore()
    await store.insert_tasks([LONG])
    runner = make_runner(model_dir, store, slots=2)
    await publish(store, runner, 0)
    long = asyncio.create_task(runner.run(await claim(store)))
    await until_put_down(runner, number=2)
    await store.insert_tasks([SHORT])
    await asyncio.wait_for(runner.run(await claim(store)), 10)
    assert not long.done()
    assert await store.get_settlement(SHORT.id) is not None
    long.cancel()
    await asyncio.wait([long])


async def test_nothing_waits_for_a_version_that_only_the_waiting_records_can_bring_about(model_dir: Path) -> None:
    store = MemoryStore()
    await store.insert_tasks([LONG])
    runner = make_runner(model_dir, store)
    runner.put_down.idle_grace_s = 0.05
    await publish(store, runner, 0)
    await asyncio.wait_for(runner.run(await claim(store)), 10)
    assert [len(turns) for turns in await turns_of(store)] == [5, 5]


async def test_a_sampler_that_dies_with_records_put_down_leaves_them_to_the_next_one(model_dir: Path) -> None:
    store = MemoryStore()
    await store.insert_tasks([LONG])
    first = make_runner(model_dir, store)
    await publish(store, first, 0)
    claimed = await claim(store)
    running = asyncio.create_task(first.run(claimed))
    await until_put_down(first, number=2)
    running.cancel()
    await asyncio.wait([running])
    await store.release_claim(claimed)
    second = make_runner(model_dir, store, partial_rollout_tokens=None)
    await publish(store, second, 1)
    await second.run(await claim(store))
    versions = [[turn.tokens.version_spans[0].version for turn in turns] for turns in await turns_of(store)]
    assert versions == [[0, 0, 1, 1, 1]] * 2
    assert len(second.agent.client.requests) == 6  # type: ignore[attr-defined]  # ScriptedEngine


async def test_a_record_whose_tools_keep_state_is_sampled_to_its_end(model_dir: Path) -> None:
    store = MemoryStore()
    await store.insert_tasks([LONG])
    runner = make_runner(model_dir, store, recovery=Recovery.STATEFUL)
    await asyncio.wait_for(runner.run(await claim(store)), 10)
    assert [len(turns) for turns in await turns_of(store)] == [5, 5]


async def test_evaluation_waits_for_no_policy(model_dir: Path) -> None:
    store = MemoryStore()
    task = replace(LONG, id="eval:0:long", split="eval")
    await store.insert_tasks([task])
    (claimed,) = await store.claim_tasks(split="eval", owner="w", lease_s=60, limit=1)
    await asyncio.wait_for(make_runner(model_dir, store).run(claimed), 10)


def turns_at(*versions: int) -> list[Turn]:
    record = make_record()
    turns = []
    for index, version in enumerate(versions):
        turns.append(make_turn(record, index=index, completion_ids=range(10), version=version))
    return turns


@pytest.mark.parametrize(
    ("versions", "num_before", "elapsed_s", "expected"),
    [
        ((0, 0), 0, 0.0, True),
        ((0,), 0, 0.0, False),
        ((0,), 0, 9.0, True),
        ((0, 0), 2, 9.0, False),  # no turn in this leg: it would never go on
        ((0, 0, 1, 1), 2, 0.0, True),
        ((0, 0, 2, 2), 2, 9.0, False),  # under version 3 its first token could not be trained
    ],
)
def test_a_leg_ends_at_its_cap_unless_the_record_could_not_be_trained_afterwards(
    versions: tuple[int, ...], num_before: int, elapsed_s: float, expected: bool
) -> None:
    limits = LegLimits(max_tokens=20, max_s=5.0, max_staleness=2)
    assert limits.are_reached(turns_at(*versions), num_before=num_before, elapsed_s=elapsed_s) is expected


def test_partial_rollouts_without_staleness_are_refused() -> None:
    with pytest.raises(ValueError, match="max_staleness >= 1"):
        RunConfig(rollout=RolloutConfig(partial_rollout_s=60), algo=AlgoConfig(max_staleness=0))
