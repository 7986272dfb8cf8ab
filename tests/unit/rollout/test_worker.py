"""The sampler process's logic on the in-memory store: capacity, epochs, takeover, giving back."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.chat import ChatFormat
from agentrl.config import AlgoConfig, InferenceConfig, RolloutConfig, RunConfig, StoreConfig
from agentrl.errors import EngineError, EngineErrorKind, StoreError
from agentrl.rollout.sampler import MCPSampler
from agentrl.rollout.worker import SamplerWorker, can_be_served, count_outstanding, run_sampler
from agentrl.store import MemoryStore
from agentrl.tools import FunctionToolbox
from agentrl.types import (
    GroupOutcome,
    InferenceService,
    PolicyVersion,
    Record,
    RecordStatus,
    Recovery,
    ServiceStatus,
    Task,
    TaskClaim,
    TaskStatus,
)
from scripted_engine import Script, ScriptedEngine
from tiny_chat import write_tiny_chat

CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'


SERVICE = InferenceService(id="scripted", base_url="http://scripted", status=ServiceStatus.UP, policy_version=0)


def add(a: int, b: int) -> str:
    """Sum of two integers."""
    return str(a + b)


def make_tasks(count: int, *, num_generations: int = 2, split: str = "train") -> list[Task]:
    return [
        Task(
            id=f"{split}:0:q{index}", item_id=f"q{index}", split=split, epoch=0, query=f"{index}: 2+3?", answer="5",
            num_generations=num_generations,
        )
        for index in range(count)
    ]  # fmt: skip


def solve(context: str, depth: int) -> str:
    """Call the tool, then answer."""
    return "<answer>5</answer>" if has_result(context) else CALL


def has_result(context: str) -> bool:
    """Whether a tool has answered already."""
    return "<tool_response>" in context


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat(tmp_path_factory.mktemp("chat"))


def make_config(*, num_train_epochs: int | None = None, **algo: int) -> RunConfig:
    return RunConfig(
        store=StoreConfig(heartbeat_s=0.02, lease_s=0.3),
        rollout=RolloutConfig(
            num_generations=2, max_new_tokens=200, max_prompt_tokens=2000, num_train_epochs=num_train_epochs
        ),
        inference=InferenceConfig(context_length=4000),
        algo=AlgoConfig(**algo),
    )


@contextlib.asynccontextmanager
async def sampler(
    model_dir: Path,
    store: MemoryStore,
    script: Script,
    *,
    config: RunConfig,
    holds: Callable[[str], bool] = lambda context: False,
) -> AsyncIterator[ScriptedEngine]:
    """A running sampler; stopped in an orderly way at the end."""
    engine = ScriptedEngine(model_dir, script)
    engine.holds = holds
    await store.put_service(SERVICE)
    stop = asyncio.Event()
    running = asyncio.create_task(
        run_sampler(
            config,
            store=store,
            toolbox=FunctionToolbox([add], recovery=Recovery.STATELESS),
            client=engine,
            chat=ChatFormat.load(model_dir),
            stop=stop,
        )
    )
    try:
        yield engine
    finally:
        stop.set()
        await asyncio.wait_for(running, 10)


async def until(condition: Callable[[], object]) -> None:
    """Poll an awaitable condition with a bound."""
    async with asyncio.timeout(10):
        while not await condition():  # type: ignore[misc]  # every caller passes a coroutine function
            await asyncio.sleep(0.005)


async def settled(store: MemoryStore) -> int:
    return (await store.count_tasks(split="train")).get(TaskStatus.SETTLED, 0)


async def test_every_generation_of_a_claimed_task_becomes_one_scored_record(model_dir: Path) -> None:
    store = MemoryStore()
    await store.insert_tasks(make_tasks(3))
    async with sampler(model_dir, store, solve, config=make_config(tasks_per_step=3, max_staleness=0)):
        await until(lambda: _reached(store, 3))
    records = await store.list_records(split="train")
    assert sorted(record.id for record in records) == sorted(
        f"train:0:q{task}/g{generation}" for task in range(3) for generation in range(2)
    )
    assert all(record.status is RecordStatus.FINISHED and record.score == 1.0 for record in records)


async def test_no_record_reads_the_tokenizer_again(model_dir: Path, tmp_path: Path) -> None:
    files = tmp_path / "model"
    shutil.copytree(model_dir, files)
    chat, engine, store = ChatFormat.load(files), ScriptedEngine(files, solve), MemoryStore()
    shutil.rmtree(files)
    await store.insert_tasks(make_tasks(1))
    await store.put_service(SERVICE)
    stop = asyncio.Event()
    running = asyncio.create_task(
        run_sampler(
            make_config(tasks_per_step=1), store=store, toolbox=FunctionToolbox([add]), client=engine, chat=chat,
            stop=stop,
        )
    )  # fmt: skip
    try:
        await until(lambda: _reached(store, 1))
    finally:
        stop.set()
        await running
    assert [record.score for record in await store.list_records(split="train")] == [1.0, 1.0]


async def test_no_task_is_claimed_unless_an_engine_is_up_and_fresh_enough() -> None:
    store = MemoryStore()
    assert not await can_be_served(store, max_staleness=1)
    await store.put_service(replace(SERVICE, status=ServiceStatus.DOWN))
    assert not await can_be_served(store, max_staleness=1)
    await store.put_service(SERVICE)
    assert await can_be_served(store, max_staleness=1)
    await store.publish_policy(PolicyVersion(version=3, path="p"))
    assert await can_be_served(store, max_staleness=1)
    assert not await can_be_served(store, max_staleness=0)


async def _reached(store: MemoryStore, count: int) -> bool:
    return await settled(store) >= count


async def test_a_group_whose_members_all_fail_is_settled_as_dropped_never_as_zero_rewards(model_dir: Path) -> None:
    store = MemoryStore()
    await store.insert_tasks(make_tasks(1))
    error = EngineError("down", kind=EngineErrorKind.REJECTED)
    async with sampler(model_dir, store, lambda context, depth: error, config=make_config(tasks_per_step=1)):
        await until(lambda: _reached(store, 1))
    settlement = await store.get_settlement("train:0:q0")
    assert settlement is not None
    assert (settlement.outcome, settlement.num_failed, dict(settlement.rewards)) == (GroupOutcome.DROPPED, 2, {})


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
async def test_no_more_groups_are_outstanding_than_the_staleness_bound_allows(
    model_dir: Path, max_staleness: int
) -> None:
    store = MemoryStore()
    await store.insert_tasks(make_tasks(12))
    config = make_config(tasks_per_step=2, max_staleness=max_staleness)
    bound = 2 * (max_staleness + 1)
    async with sampler(model_dir, store, solve, config=config):
        await until(lambda: _reached(store, bound))
        assert await count_outstanding(store, split="train") == bound


async def test_an_empty_queue_is_refilled_with_the_next_epoch(model_dir: Path) -> None:
    store = MemoryStore()
    await store.insert_tasks(make_tasks(2))
    async with sampler(model_dir, store, solve, config=make_config(tasks_per_step=5, max_staleness=0)):
        await until(lambda: _reached(store, 5))
    epochs = {record.task_id.split(":")[1] for record in await store.list_records(split="train")}
    assert epochs == {"0", "1", "2"}


class LookedAt(MemoryStore):
    """Counts how often a sampler looked for work, and whose Records it opened."""

    num_looks = 0

    async def count_tasks(self, *, split: str) -> dict[TaskStatus, int]:
        self.num_looks += 1
        return await super().count_tasks(split=split)


async def _looked_again(store: LookedAt, *, since: int) -> bool:
    return store.num_looks >= since + 3


async def epochs_of(store: MemoryStore) -> list[int]:
    states = await store.find_tasks(await store.list_task_ids())
    return sorted({state.task.epoch for state in states})


async def test_exactly_as_many_epochs_are_sampled_as_asked_for(model_dir: Path) -> None:
    store = LookedAt()
    await store.insert_tasks(make_tasks(2))
    config = make_config(num_train_epochs=2, tasks_per_step=20, max_staleness=0)
    async with sampler(model_dir, store, solve, config=config):
        await until(lambda: _reached(store, 4))
        since = store.num_looks
        await until(lambda: _looked_again(store, since=since))
    assert await epochs_of(store) == [0, 1]


async def test_a_restarted_sampler_goes_on_with_the_next_epoch_and_enqueues_none_again(model_dir: Path) -> None:
    store = MemoryStore()
    await store.insert_tasks(make_tasks(2))
    for num_epochs in (2, 3):
        config = make_config(num_train_epochs=num_epochs, tasks_per_step=20, max_staleness=0)
        async with sampler(model_dir, store, solve, config=config):
            await until(lambda: _reached(store, 2 * num_epochs))  # noqa: B023 - awaited within the turn of the loop
    assert await epochs_of(store) == [0, 1, 2]
    assert len(await store.list_task_ids()) == 6
    assert {record.fence for record in await store.list_records(split="train")} == {1}


async def test_a_failure_between_claim_and_first_turn_gives_the_task_back_at_once(model_dir: Path) -> None:
    class Broken(MemoryStore):
        async def open_records(self, claim: TaskClaim) -> list[Record]:
            raise StoreError("cannot open the records")

    store = Broken()
    await store.insert_tasks(make_tasks(1))
    await store.put_service(SERVICE)
    with pytest.raises(StoreError, match="cannot open the records"):
        await asyncio.wait_for(
            run_sampler(
                make_config(tasks_per_step=1), store=store, toolbox=FunctionToolbox([add]),
                client=ScriptedEngine(model_dir, solve), chat=ChatFormat.load(model_dir), stop=asyncio.Event(),
            ),
            timeout=10,
        )  # fmt: skip
    (state,) = await store.find_tasks(await store.list_task_ids())
    assert (state.status, state.fence) == (TaskStatus.PENDING, 1)


async def test_a_stopped_sampler_gives_its_tasks_back_and_another_resumes_them_mid_record(model_dir: Path) -> None:
    store = MemoryStore()
    await store.insert_tasks(make_tasks(1))
    config = make_config(tasks_per_step=1, max_staleness=0)
    async with sampler(model_dir, store, solve, config=config, holds=has_result):
        await until(lambda: _both_have_a_turn(store))
    assert (await store.count_tasks(split="train")).get(TaskStatus.PENDING) == 1
    async with sampler(model_dir, store, solve, config=config) as second:
        await until(lambda: _reached(store, 1))
    assert len(second.requests) == 2
    records = await store.list_records(split="train")
    assert [len(record.turn_ids) for record in records] == [2, 2]
    assert all(record.score == 1.0 for record in records)


async def _both_have_a_turn(store: MemoryStore) -> bool:
    records = await store.list_records(split="train")
    return len(records) == 2 and all(record.turn_ids for record in records)


async def _has_asked(engine: ScriptedEngine) -> bool:
    return len(engine.requests) == 2


async def test_a_worker_that_lost_its_claim_stops_that_group_and_carries_on(model_dir: Path) -> None:
    store = MemoryStore()
    await store.insert_tasks(make_tasks(1))
    engine = ScriptedEngine(model_dir, solve)
    engine.holds = lambda context: True
    config = make_config(tasks_per_step=1)
    worker = SamplerWorker.build(
        config, split="train", store=store, toolbox=FunctionToolbox([add], recovery=Recovery.STATELESS), client=engine,
        chat=ChatFormat.load(model_dir), sampler_class=MCPSampler,
    )  # fmt: skip
    assert await worker.claim(1) == 1
    claim, group = next(iter(worker.groups.values()))
    await until(lambda: _has_asked(engine))
    await store.release_claim(claim)
    (stolen,) = await store.claim_tasks(split="train", owner="thief", lease_s=60, limit=1)
    async with worker.upkeep():
        await asyncio.wait([group], timeout=5)
        assert group.cancelled()
    assert stolen.fence == claim.fence + 1
    assert await store.renew_claims([stolen], lease_s=60) == []
