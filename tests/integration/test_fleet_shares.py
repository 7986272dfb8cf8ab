"""One set of samplers serves several runs: shares, priorities, joining, leaving, budgets. The engine is scripted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast

import pytest

from agentrl.config.prices import NANO_PER_USD, PriceTable
from agentrl.config.secrets import masked
from agentrl.errors import BudgetSpentError, StoreError
from agentrl.fleets import FleetRun, FleetRunStatus, FleetUsage
from agentrl.protocols import Store
from agentrl.rollout.spending import Spending
from agentrl.store import MemoryFleetRuns, MemoryStore, open_fleet_runs, open_store
from agentrl.types import Record, RecordStatus, ServiceStatus, TaskStatus
from factories import make_task
from fleet_process import fleet_process
from fleet_world import FleetWorld, make_config, until
from idle_trainer import Trainer
from tiny_chat import write_tiny_chat

NUM_TASKS = 200


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat(tmp_path_factory.mktemp("chat"))


@pytest.fixture
def world(model_dir: Path) -> FleetWorld:
    return FleetWorld(model_dir=model_dir, fleet=MemoryFleetRuns())


def assert_shares(counts: Counter[str], shares: dict[str, float]) -> None:
    """Each run has its share, within 5 % of that share or, where that is less than a Task or two, within two Tasks."""
    total = sum(counts[name] for name in shares)
    for name, share in shares.items():
        expected = total * share / sum(shares.values())
        assert abs(counts[name] - expected) <= max(2, 0.05 * expected), dict(counts)


async def assert_nothing_lost_or_twice(stores: dict[str, Store], *, num_tasks: int) -> None:
    """Every Task is there; a settled one has exactly its Records, each finished once."""
    for store in stores.values():
        counts = await store.count_tasks(split="train")
        assert sum(counts.values()) == num_tasks
        assert counts.get(TaskStatus.RUNNING, 0) == 0
        by_task: dict[str, list[Record]] = {}
        for record in await store.list_records(limit=10_000):
            by_task.setdefault(record.task_id, []).append(record)
        whole = [task for task, records in by_task.items() if all(r.status is RecordStatus.FINISHED for r in records)]
        assert all(sorted(r.generation for r in records) == [0, 1] for records in by_task.values())
        assert len(whole) >= counts.get(TaskStatus.SETTLED, 0)
        for state in await store.find_tasks(list(by_task)):
            if state.status is TaskStatus.SETTLED:
                assert state.settlement is not None
                assert state.settlement.num_failed == 0


@pytest.mark.parametrize("shares", [{"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 2.0, "c": 5.0}])
@pytest.mark.parametrize("num_samplers", [1, 2])
async def test_runs_get_their_shares_of_two_hundred_tasks(
    world: FleetWorld, shares: dict[str, float], num_samplers: int
) -> None:
    for name, share in shares.items():
        await world.add_run(FleetRun(name=name, share=share), MemoryStore(), num_tasks=NUM_TASKS)
    async with world.samplers(num_samplers):
        counts = await world.settled_when(lambda counts: counts.total() >= NUM_TASKS)
    assert_shares(counts, shares)
    await assert_nothing_lost_or_twice(world.stores, num_tasks=NUM_TASKS)


async def test_a_run_that_joins_late_and_one_that_leaves_change_the_shares_from_then_on(world: FleetWorld) -> None:
    await world.add_run(FleetRun(name="a"), MemoryStore(), num_tasks=400, delay_s=0.003)
    await world.add_run(FleetRun(name="b"), MemoryStore(), num_tasks=400, delay_s=0.003)
    async with world.samplers(1):  # several know of each other's grants as of the last look, a hundred of these Tasks
        await world.settled_when(lambda counts: counts.total() >= 100)
        await world.add_run(FleetRun(name="c", share=2.0), MemoryStore(), num_tasks=400, delay_s=0.003)
        joined = await world.granted_when(lambda counts: counts["c"] >= 1)
        late = await world.granted_when(lambda counts: counts.total() >= joined.total() + NUM_TASKS)
        assert_shares(late - joined, {"a": 1.0, "b": 1.0, "c": 2.0})
        left = next(run for run in await world.fleet.list_fleet_runs() if run.name == "a")
        await world.fleet.put_fleet_run(replace(left, status=FleetRunStatus.LEFT))
        await until(lambda: _all_have_stopped(world.stores["a"]))
        gone = await world.granted_when(lambda counts: True)
        end = await world.granted_when(lambda counts: counts.total() >= gone.total() + NUM_TASKS)
    assert end["a"] == gone["a"]
    assert_shares(end - gone, {"b": 1.0, "c": 2.0})
    await assert_nothing_lost_or_twice(world.stores, num_tasks=400)


async def _has_nothing_running(store: Store) -> bool:
    return (await store.count_tasks(split="train")).get(TaskStatus.RUNNING, 0) == 0


async def _all_have_stopped(store: Store) -> bool:
    return all(worker.phase == "stopped" for worker in await store.list_workers())


async def test_tasks_of_a_run_that_left_are_continued_from_their_last_turn_when_it_is_back(world: FleetWorld) -> None:
    run = FleetRun(name="a")
    await world.add_run(run, MemoryStore(), num_tasks=2)
    world.engines["a"].holds = lambda context: "<tool_response>" in context  # after the first turn, silence
    async with world.samplers(1):
        await until(lambda: _all_have_a_turn(world.stores["a"], 4))
        await world.fleet.put_fleet_run(replace(run, status=FleetRunStatus.LEFT))
        await until(lambda: _has_nothing_running(world.stores["a"]))
        world.engines["a"].holds = lambda context: False
        before = len(world.engines["a"].replies)
        await world.fleet.put_fleet_run(run)
        await world.settled_when(lambda counts: counts["a"] == 2)
    assert len(world.engines["a"].replies) - before == 4  # the second turns alone
    (entry,) = await world.fleet.list_fleet_runs()
    assert entry.num_tasks == 2  # charged once, though claimed twice


async def _all_have_a_turn(store: Store, count: int) -> bool:
    return len([record for record in await store.list_records() if record.turn_ids]) == count


async def test_a_higher_priority_leaves_only_what_it_cannot_use(world: FleetWorld) -> None:
    await world.add_run(FleetRun(name="low"), MemoryStore(), num_tasks=50)
    await world.add_run(FleetRun(name="high", priority=1), MemoryStore(), num_tasks=50)
    async with world.samplers(1):
        counts = await world.settled_when(lambda counts: counts["high"] >= 45)
        assert counts["low"] <= 2
        await world.settled_when(lambda counts: counts["low"] == 50)


async def test_admission_of_each_run_is_by_its_own_trainer(world: FleetWorld) -> None:
    await world.add_run(FleetRun(name="slow"), MemoryStore(), num_tasks=50, tasks_per_step=3)
    await world.add_run(FleetRun(name="fast"), MemoryStore(), num_tasks=50)
    async with world.samplers(1):
        counts = await world.settled_when(lambda counts: counts["fast"] == 50 and counts["slow"] >= 3)
    assert counts["slow"] == 3  # one step's worth, which nobody trains


async def test_a_budget_of_tasks_is_kept_to_the_task_and_ends_the_trainer(world: FleetWorld) -> None:
    store = MemoryStore()
    await world.add_run(FleetRun(name="a", budget_tasks=10), store, num_tasks=50, tasks_per_step=4)
    await world.add_run(FleetRun(name="b"), MemoryStore(), num_tasks=100)
    trainer = Trainer(world.configs["a"], store, world.engines["a"])
    async with world.samplers(2):
        with pytest.raises(BudgetSpentError, match=r"step 3: .*budget_tasks = 10 is used up; 2 of tasks_per_step = 4"):
            await trainer.steps(5)
        runs = await world.runs_when(lambda runs: runs["a"].status is FleetRunStatus.STOPPED)
        assert (runs["a"].reason, runs["a"].num_tasks) == ("budget_tasks = 10 is used up", 10)
        await world.settled_when(lambda counts: counts["b"] == 100)
        assert (await store.count_tasks(split="train"))[TaskStatus.PENDING] == 40
        await world.fleet.put_fleet_run(replace(runs["a"], budget_tasks=12))  # raised: it goes on by itself
        await until(lambda: _has_pending(store, 38))
    assert len({record.task_id for record in await store.list_records(limit=1000)}) == 12


class WatchedFleetRuns(MemoryFleetRuns):
    """Remembers how often it was looked at, and the statuses it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.num_looks = 0
        self.moves: list[FleetRunStatus] = []

    async def list_fleet_runs(self) -> list[FleetRun]:
        self.num_looks += 1
        return await super().list_fleet_runs()

    async def move_fleet_run(self, run_name, *, source, target, reason):  # type: ignore[no-untyped-def]  # as the parent
        self.moves.append(target)
        await super().move_fleet_run(run_name, source=source, target=target, reason=reason)


async def test_a_charge_that_another_sampler_takes_back_at_once_does_not_stop_the_run(model_dir: Path) -> None:
    """The other one reserved the last Task of the budget, and its claim found nothing."""
    fleet = WatchedFleetRuns()
    world = FleetWorld(model_dir=model_dir, fleet=fleet)
    await world.add_run(FleetRun(name="a", budget_tasks=5), MemoryStore(), num_tasks=20)
    await fleet.put_fleet_usage("a", member="other", usage=FleetUsage(num_tasks=1))
    async with world.samplers(1):
        await world.settled_when(lambda counts: counts["a"] == 4)
        seen = fleet.num_looks
        await until(lambda: _is_looked_at(fleet, seen + 3))
        await fleet.put_fleet_usage("a", member="other", usage=FleetUsage())
        assert fleet.moves == []
        await world.settled_when(lambda counts: counts["a"] == 5)
        await world.runs_when(lambda runs: runs["a"].status is FleetRunStatus.STOPPED)
    assert fleet.moves == [FleetRunStatus.STOPPED]
    assert await _has_pending(world.stores["a"], 15)


async def _is_looked_at(fleet: WatchedFleetRuns, num_looks: int) -> bool:
    return fleet.num_looks >= num_looks


async def _has_pending(store: Store, count: int) -> bool:
    return (await store.count_tasks(split="train"))[TaskStatus.PENDING] == count


async def test_a_budget_of_tokens_stops_a_run_once_it_is_sampled(world: FleetWorld) -> None:
    await world.add_run(FleetRun(name="a", budget_tokens=2000), MemoryStore(), num_tasks=200, delay_s=0.02)
    async with world.samplers(1):
        await world.runs_when(lambda runs: runs["a"].status is FleetRunStatus.STOPPED)
        await until(lambda: _has_nothing_running(world.stores["a"]))
    (run,) = await world.fleet.list_fleet_runs()
    assert run.num_tokens == sum(r.num_completion_tokens for r in await world.stores["a"].list_records(limit=1000))
    assert run.num_tokens >= 2000
    assert (await world.settled())["a"] < 200
    assert await cast("MemoryStore", world.stores["a"]).sampling_stop() == run.reason


async def test_a_run_whose_money_is_spent_tells_its_trainer_and_goes_on_with_more(
    world: FleetWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.rollout.fleet.RETRY_S", 1.0)
    store = MemoryStore()
    await world.add_run(FleetRun(name="a"), store, num_tasks=10)
    await world.add_run(FleetRun(name="b"), MemoryStore(), num_tasks=20)
    prices = PriceTable.model_validate({"model": {"*": {"per_call": 0.01}}})
    world.spending["a"] = Spending(prices=prices, account=store, budget_usd=0.125)
    async with world.samplers(2):
        await world.settled_when(lambda counts: counts["b"] == 20)
        await until(lambda: _is_stopped(store))
        assert "budget_usd = 0.125 is spent: 0.12 used" in (await store.sampling_stop() or "")
        assert await store.spent() == 12 * NANO_PER_USD // 100
        assert await _has_nothing_running(store)
        world.spending["a"] = replace(world.spending["a"], budget_usd=10)
        await world.settled_when(lambda counts: counts["a"] == 10)
        assert await store.sampling_stop() is None
    records = await store.list_records(limit=100)
    assert await store.spent() == sum(record.cost_nano_usd for record in records) == 40 * NANO_PER_USD // 100


async def _is_stopped(store: MemoryStore) -> bool:
    return await store.sampling_stop() is not None


async def test_a_run_no_service_works_for_frees_its_places(world: FleetWorld) -> None:
    world.max_records = 4
    await world.add_run(FleetRun(name="a"), MemoryStore(), num_tasks=10)
    await world.add_run(FleetRun(name="b"), MemoryStore(), num_tasks=0)
    world.engines["a"].holds = lambda context: True
    async with world.samplers(1):
        await until(lambda: _has_pending(world.stores["a"], 8))
        await world.set_served("a", ServiceStatus.DRAINING)
        await world.stores["b"].insert_tasks([make_task(f"q{number}", answer="5") for number in range(5)])
        assert not await _has_pending(world.stores["a"], 10)  # what it works on may be finished
        await world.set_served("a", ServiceStatus.DOWN)
        await world.settled_when(lambda counts: counts["b"] == 5)
        assert await _has_pending(world.stores["a"], 10)


async def test_a_service_that_fell_silent_serves_nobody(world: FleetWorld) -> None:
    moved = timedelta()
    silent = MemoryStore(clock=lambda: datetime.now(UTC) + moved)
    await world.add_run(FleetRun(name="silent"), silent, num_tasks=5)
    await world.add_run(FleetRun(name="well"), MemoryStore(), num_tasks=20)
    moved = timedelta(seconds=20)
    async with world.samplers(1):
        await world.settled_when(lambda counts: counts["well"] == 20)
        assert await _has_pending(silent, 5)
        await world.set_served("silent", ServiceStatus.UP)
        await world.settled_when(lambda counts: counts["silent"] == 5)


class BrokenStore(MemoryStore):
    """A run's database that fails."""

    async def open_records(self, claim):  # type: ignore[no-untyped-def]  # as the parent
        raise StoreError("the disk is gone")


async def test_a_run_that_breaks_does_not_keep_the_others_from_their_work(world: FleetWorld) -> None:
    await world.add_run(FleetRun(name="broken"), BrokenStore(), num_tasks=5)
    await world.add_run(FleetRun(name="well"), MemoryStore(), num_tasks=20)
    async with world.samplers(1):
        await world.settled_when(lambda counts: counts["well"] == 20)
    assert (await world.settled())["broken"] == 0


async def test_shares_hold_over_the_wire_although_a_sampler_process_is_killed(
    model_dir: Path, mongo_uri: str, database_name: str
) -> None:
    """Two processes; one dies in the middle of its groups, and their leases have to lapse."""
    shares = {"a": 1.0, "b": 2.0, "c": 5.0}
    fleet = open_fleet_runs(mongo_uri, fleet_name=database_name)
    await fleet.prepare()
    stores: dict[str, Store] = {}
    world = FleetWorld(model_dir=model_dir, fleet=fleet, poll_s=0.2)
    for name, share in shares.items():
        run_name = f"{database_name}_{name}"
        stores[name] = open_store(mongo_uri, database=run_name)
        await stores[name].prepare()
        config = masked(make_config(run_name))
        run = FleetRun(name=run_name, share=share, config=config)
        await world.add_run(run, stores[name], num_tasks=int(30 * share))
    names = {name: f"{database_name}_{name}" for name in shares}
    async with world.heartbeats():
        with (
            fleet_process(mongo_uri, database_name, model_dir, delay_s=0.02) as first,
            fleet_process(mongo_uri, database_name, model_dir, delay_s=0.02),
        ):
            await world.settled_when(lambda counts: counts.total() >= 60)
            first.kill()
            counts = await world.settled_when(lambda counts: counts.total() >= NUM_TASKS)
            await world.settled_when(lambda counts: counts.total() == 240)
    assert_shares(Counter({name: counts[names[name]] for name in shares}), shares)
    fences = []
    for name, store in stores.items():
        await assert_nothing_lost_or_twice({name: store}, num_tasks=int(30 * shares[name]))
        fences += [state.fence for state in await store.find_tasks(await store.list_task_ids())]
        await store.close()
    assert max(fences) > 1  # what the killed process held was taken over
    await fleet.close()
