"""The database of a fleet and its runs is away longer than db_timeout_s: the samplers wait for it and go on."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from agentrl.cli.connect import prepared_store
from agentrl.cli.fleet_connect import open_fleet, with_run_name
from agentrl.config import RunConfig, StoreConfig
from agentrl.fleets import FleetRun
from agentrl.protocols import Store
from agentrl.rollout.fleet import run_fleet_sampler
from agentrl.store import MemoryStore
from agentrl.types import TaskStatus
from crashing_server import CrashingServer
from fleet_world import FleetWorld, make_config
from tiny_chat import write_tiny_chat

TIMEOUT_S = 0.8  # db_timeout_s
OUTAGE_S = 3 * TIMEOUT_S
NUM_TASKS = 24


def process_config(crashing: CrashingServer) -> RunConfig:
    config = make_config("unused")
    store = StoreConfig(db_connection_string=crashing.server.uri, db_timeout_s=TIMEOUT_S, lease_s=3600, heartbeat_s=0.1)
    return config.model_copy(update={"store": store, "run": config.run.model_copy(update={"fleet_name": "fleet"})})


@pytest.mark.parametrize("runs_are_away", [True, False], ids=["everything", "documents of the fleet alone"])
async def test_samplers_outlast_an_outage_without_giving_a_task_back_and_budgets_stay_exact(
    crashing: CrashingServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, *, runs_are_away: bool
) -> None:
    config, stop = process_config(crashing), asyncio.Event()
    caplog.set_level(logging.INFO)
    async with open_fleet(config, outlasts_until=stop) as fleet:
        world = FleetWorld(model_dir=write_tiny_chat(tmp_path), fleet=fleet, poll_s=0.05)
        budgets = {"a": 12, "b": None}
        for name, budget_tasks in budgets.items():
            store: Store = MemoryStore()
            if runs_are_away:
                store = await prepared_store(with_run_name(config, name), outlasts_until=stop)
            run = FleetRun(name=name, budget_tasks=budget_tasks)
            await world.add_run(run, store, num_tasks=NUM_TASKS, delay_s=0.05)
            world.configs[name] = with_run_name(config, name)
        async with world.samplers(2):
            await world.settled_when(lambda counts: counts.total() >= 6)
            await crashing.stay_away(OUTAGE_S)
            await world.settled_when(lambda counts: counts == {"a": 12, "b": NUM_TASKS})
        granted = await world.granted_when(lambda counts: True)
        for store in world.stores.values():
            records = await store.list_records(limit=1000)
            assert {(record.attempt, record.fence) for record in records} == {(1, 1)}
            await store.close()
    assert granted == {"a": 12, "b": NUM_TASKS}
    assert "set aside" not in caplog.text


async def test_a_sampler_that_is_to_stop_does_not_wait_for_the_fleets_documents(
    crashing: CrashingServer, tmp_path: Path
) -> None:
    """Only the fleet's own documents are in the database that went away."""
    stop = asyncio.Event()
    async with open_fleet(process_config(crashing), outlasts_until=stop) as fleet:
        world = FleetWorld(model_dir=write_tiny_chat(tmp_path), fleet=fleet)
        await world.add_run(FleetRun(name="a"), MemoryStore(), num_tasks=500, delay_s=0.01)
        sampling = asyncio.create_task(run_fleet_sampler(fleet, open_run=world.open_run, max_records=8, stop=stop))
        await world.settled_when(lambda counts: counts["a"] >= 1)
        crashing.server.kill()
        stop.set()
        async with asyncio.timeout(20 * TIMEOUT_S):
            await sampling
        await asyncio.to_thread(crashing.start)
    counts = await world.stores["a"].count_tasks(split="train")
    assert counts.get(TaskStatus.RUNNING, 0) == 0
