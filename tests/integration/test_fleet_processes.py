"""Two runs trained at the same time by one sampler process and one engine: the commands as a user gives them."""

import asyncio
import re
from pathlib import Path

import pytest

from agentrl.store import open_store
from agentrl.types import StepStatus
from launched_run import DEADLINE_S, agentrl, output_of, write_run

pytestmark = pytest.mark.timeout(300)


def test_two_runs_share_one_sampler_and_one_engine_and_one_is_ended_by_its_budget(
    tmp_path: Path, mongo_uri: str, database_name: str
) -> None:
    names = {name: f"{database_name}_{name}" for name in ("a", "b")}
    folder = write_run(tmp_path, db_connection_string=mongo_uri, max_steps=3, fleet_dwell_s=1)
    settings = ("--config", "run.yaml")
    for run_name in names.values():
        output_of(folder, "tasks", "load", run_name, *settings)
    output_of(folder, "fleet", "add", database_name, names["a"], *settings)
    output_of(folder, "fleet", "add", database_name, names["b"], *settings, "--share", "2", "--budget_tasks", "5")
    fleet = ("--fleet_name", database_name)
    with (
        agentrl(folder, "serve", *fleet, *settings) as engine,
        agentrl(folder, "sample", *fleet, *settings) as sampler,
        agentrl(folder, "train", names["a"], *settings) as first,
        agentrl(folder, "train", names["b"], *settings) as second,
    ):
        told, _ = second.communicate(timeout=DEADLINE_S)
        assert second.returncode == 4, told
        assert "step 3: sampling was stopped: budget_tasks = 5 is used up; 1 of tasks_per_step = 2" in told
        told, _ = first.communicate(timeout=DEADLINE_S)
        assert first.returncode == 0, told
        for process in (sampler, engine):
            process.terminate()
            process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 0
    shown = output_of(folder, "fleet", "status", database_name, *settings)
    assert re.search(rf"{names['b']} +stopped +0 +2 +5 +5 .*budget_tasks = 5 is used up", shown), shown
    assert "stopped: budget_tasks = 5 is used up" in output_of(folder, "status", names["b"], "--once", *settings)
    for name, num_steps in (("a", 3), ("b", 2)):
        asyncio.run(_check_run(mongo_uri, names[name], num_steps=num_steps))
        assert "no findings" in output_of(folder, "audit", names[name], *settings)


async def _check_run(uri: str, run_name: str, *, num_steps: int) -> None:
    """Trained as often as it should be, and no service is left that says it is up."""
    store = open_store(uri, database=run_name)
    await store.prepare()
    steps = [step for step in await store.list_steps() if step.status is StepStatus.COMMITTED]
    assert [step.step for step in steps] == [*range(1, num_steps + 1)]
    assert {service.status.value for service in await store.list_services()} == {"DOWN"}
    await store.close()
