"""One claimed group through the real chain (claim, turns, settlement, rows) on the in-memory store."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from agentrl.chat import ChatFormat
from agentrl.config import InferenceConfig, RolloutConfig, RunConfig
from agentrl.rollout import Agent, AsyncSampler
from agentrl.rollout.groups import GroupRunner
from agentrl.store import MemoryStore
from agentrl.tools import FunctionToolbox
from agentrl.types import DBRecordData, Record, Task, TaskClaim
from scripted_engine import ScriptedEngine


async def claim_task(store: MemoryStore, task: Task) -> TaskClaim:
    await store.insert_tasks([task])
    (claim,) = await store.claim_tasks(split=task.split, owner="first", lease_s=60, limit=1)
    return claim


def make_config(**rollout: object) -> RunConfig:
    settings = {"num_generations": 2, "max_new_tokens": 200, "max_prompt_tokens": 2000, **rollout}
    return RunConfig(rollout=RolloutConfig.model_validate(settings), inference=InferenceConfig(context_length=4000))


def make_agent(
    config: RunConfig, *, store: MemoryStore, engine: ScriptedEngine, toolbox: FunctionToolbox | None = None
) -> Agent:
    return Agent(
        chat=ChatFormat.load(engine.model_dir, tool_call_parser=config.rollout.tool_call_parser),
        client=engine,
        toolbox=toolbox or FunctionToolbox([]),
        journal=store,
        commit_turn=store.commit_turn,
        rollout=config.rollout,
        inference=config.inference,
        tool_timeout_s=5.0,
        clock=lambda: datetime.now(UTC),
    )


async def run_group(
    claim: TaskClaim, *, store: MemoryStore, engine: ScriptedEngine, sampler: type[AsyncSampler], **rollout: object
) -> None:
    """Sample and settle the group."""
    config = make_config(**rollout)
    agent = make_agent(config, store=store, engine=engine)
    runner = GroupRunner(config=config, store=store, agent=agent, sampler_class=sampler, slots=asyncio.Semaphore(8))
    await runner.run(claim)


async def records_and_rows(store: MemoryStore, task: Task) -> tuple[list[Record], list[DBRecordData]]:
    records = sorted(await store.list_records(task_id=task.id), key=lambda record: record.generation)
    return records, await store.load_sequences(await store.list_sequences(split=task.split))
