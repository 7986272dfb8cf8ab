"""`agentrl merge-report` reads a run's ledger and rows from the database."""

import asyncio
import json

import pytest

from agentrl.cli.main import main
from agentrl.inspector.merge_report import group_layout_tokens
from agentrl.store import open_store
from agentrl.types import GroupOutcome, GroupSettlement, StepStatus, TrainStep
from factories import make_task
from trees import group_rows


async def train_one_step(uri: str, database: str) -> None:
    store = open_store(uri, database=database)
    await store.prepare()
    task = make_task("q", num_generations=4)
    rows = group_rows()
    await store.insert_tasks([task])
    (claim,) = await store.claim_tasks(split="train", owner="w", lease_s=600, limit=1)
    settlement = GroupSettlement(task_id=task.id, outcome=GroupOutcome.TRAINABLE, rewards={}, advantages={})
    await store.settle_task(claim, settlement, rows)
    (group,) = await store.settled_groups(split="train", limit=1)
    assert [one.num_shared_tokens for one in group.sequences] == [0, 12, 6, 6]
    step = TrainStep(
        step=1,
        status=StepStatus.PLANNED,
        policy_version=0,
        task_ids=(task.id,),
        sequence_ids=(*(row.id for row in rows), "train:0:q/gone/s0"),
    )
    await store.plan_step(step)
    await store.close()


def test_the_report_counts_the_rows_of_every_step(
    mongo_uri: str,
    database_name: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["merge-report", database_name, "--db_connection_string", mongo_uri]
    assert main(command) == 2  # nothing there yet
    asyncio.run(train_one_step(mongo_uri, database_name))
    capsys.readouterr()

    assert main([*command, "--json"]) == 0
    expected = {**group_layout_tokens(group_rows()).as_json(), "num_missing": 1}
    assert json.loads(capsys.readouterr().out) == {"1": expected}
    assert main(command) == 0
    assert "fewer tokens than one row per branch" in capsys.readouterr().out
    assert main([*command, "--step", "2"]) == 2
    assert "no step 2" in capsys.readouterr().err
