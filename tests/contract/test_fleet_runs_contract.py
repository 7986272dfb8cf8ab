"""The documents of a fleet: both implementations keep the same promises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from agentrl.errors import UnavailableError
from agentrl.fleets import FleetRun, FleetRunStatus, FleetRunStore, FleetUsage
from agentrl.store import MemoryFleetRuns, MongoStore, open_fleet_runs
from agentrl.store.fleet_runs import fleet_run_from_document
from factories import make_task

RUN = FleetRun(name="run_a", share=2.0, priority=1, budget_tasks=10, config={"algo": {"tasks_per_step": 4}})


@pytest.fixture(params=["memory", "embedded"])
async def fleet(request: pytest.FixtureRequest, database_name: str) -> AsyncIterator[FleetRunStore]:
    if request.param == "memory":
        yield MemoryFleetRuns()
        return
    opened = open_fleet_runs(request.getfixturevalue("mongo_uri"), fleet_name=database_name)
    await opened.prepare()
    yield opened
    await opened.close()


async def only(fleet: FleetRunStore) -> FleetRun:
    (run,) = await fleet.list_fleet_runs()
    return run


async def test_a_run_comes_back_as_it_was_put(fleet: FleetRunStore) -> None:
    assert await fleet.list_fleet_runs() == []
    await fleet.put_fleet_run(RUN)
    await fleet.put_fleet_run(FleetRun(name="another"))
    assert await fleet.list_fleet_runs() == [FleetRun(name="another"), RUN]


async def test_what_a_user_changes_leaves_usage_and_schedule_alone(fleet: FleetRunStore) -> None:
    await fleet.put_fleet_run(RUN)
    await fleet.put_fleet_usage("run_a", member="p1", usage=FleetUsage(num_tasks=3, num_tokens=70, virtual_time=1.5))
    await fleet.raise_fleet_offset("run_a", offset=4.0)
    await fleet.put_fleet_run(replace(RUN, share=5.0, budget_tasks=None))
    run = await only(fleet)
    assert (run.share, run.budget_tasks) == (5.0, None)
    assert (run.num_tasks, run.num_tokens, run.virtual_time) == (3, 70, 5.5)


async def test_usage_of_many_processes_adds_up_and_repeating_a_write_changes_nothing(fleet: FleetRunStore) -> None:
    await fleet.put_fleet_run(RUN)

    async def work(member: str) -> None:
        for count in range(1, 6):
            usage = FleetUsage(num_tasks=count, num_tokens=10 * count, virtual_time=count / 2)
            await fleet.put_fleet_usage("run_a", member=member, usage=usage)
            await fleet.put_fleet_usage("run_a", member=member, usage=usage)

    await asyncio.gather(*(work(f"p{index}") for index in range(4)))
    run = await only(fleet)
    assert (run.num_tasks, run.num_tokens, run.virtual_time) == (20, 200, 10.0)


async def test_an_offset_only_grows(fleet: FleetRunStore) -> None:
    await fleet.put_fleet_run(RUN)
    assert (await only(fleet)).offset is None
    for offset in (0.0, 3.0, 2.0):
        await fleet.raise_fleet_offset("run_a", offset=offset)
    assert (await only(fleet)).offset == 3.0


async def test_a_status_moves_only_from_where_it_was_seen(fleet: FleetRunStore) -> None:
    await fleet.put_fleet_run(replace(RUN, status=FleetRunStatus.PAUSED))
    stop = {"source": FleetRunStatus.ACTIVE, "target": FleetRunStatus.STOPPED, "reason": "spent"}
    await fleet.move_fleet_run("run_a", **stop)  # type: ignore[arg-type]
    assert (await only(fleet)).status is FleetRunStatus.PAUSED
    await fleet.put_fleet_run(RUN)
    await fleet.move_fleet_run("run_a", **stop)  # type: ignore[arg-type]
    assert ((await only(fleet)).status, (await only(fleet)).reason) == (FleetRunStatus.STOPPED, "spent")


async def test_what_is_written_for_a_run_that_is_gone_makes_no_entry(fleet: FleetRunStore) -> None:
    await fleet.put_fleet_usage("gone", member="p", usage=FleetUsage(num_tasks=1))
    await fleet.raise_fleet_offset("gone", offset=1.0)
    assert await fleet.list_fleet_runs() == []


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"share": 0}, "share = 0 is no number above 0"),
        ({"share": "much"}, "share = 'much'"),
        ({"priority": None}, "priority = None"),
        ({"budget_tasks": "ten"}, "budget_tasks = 'ten'"),
        ({"status": "aktive"}, "aktive"),
    ],
)
def test_an_entry_edited_into_nonsense_is_paused_and_says_why(fields: dict[str, object], reason: str) -> None:
    run = fleet_run_from_document({"_id": "a", **fields})
    assert run.status is FleetRunStatus.PAUSED
    assert reason in run.reason


def test_an_entry_with_nothing_but_a_name_is_an_active_run() -> None:
    assert fleet_run_from_document({"_id": "a"}) == FleetRun(name="a")


async def test_the_database_of_a_run_is_no_fleet(mongo_store: MongoStore, mongo_uri: str, database_name: str) -> None:
    await mongo_store.insert_tasks([make_task()])
    fleet = open_fleet_runs(mongo_uri, fleet_name=database_name)
    with pytest.raises(UnavailableError, match="this is the database of a run"):
        await fleet.prepare()
    await fleet.close()
