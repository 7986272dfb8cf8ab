"""Some forty kills of samplers, engines, trainer and database: the short mode of benchmarks/kill_campaign.py."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.database import Database

from agentrl.store import MongoStore
from audit_run import LATER, TRAINED, make_run
from kill_campaign import BOUND_S, Campaign, run_campaign
from kill_plan import SCRIPTED, plan_blows
from kill_reader import Reader, Shadow, check_records, check_training
from tiny_chat import write_tiny_chat

NUM_KILLS = 42
SHARED_CORES_S = 8.0  # processes start late when other tests have the cores; a Record left behind waits far longer


@pytest.mark.timeout(300)
def test_kills_of_several_processes_at_once_lose_double_and_skip_nothing(tmp_path: Path) -> None:
    told: list[str] = []
    campaign = Campaign(seed=11, cast=SCRIPTED, tell=told.append)
    run_campaign(tmp_path, campaign=campaign, num_kills=NUM_KILLS, kills_per_run=NUM_KILLS, num_victims=(5, 7))
    seen = "\n".join(told)
    assert len(campaign.kills) >= NUM_KILLS
    assert {kill.kind for kill in campaign.kills} == {"database", "engine", "sampler", "trainer"}
    assert [finding for kill in campaign.kills for finding in kill.findings] == [], seen
    assert list(campaign.at_the_end) == [], seen
    assert campaign.num_runs == 1
    assert campaign.num_turns > NUM_KILLS
    assert campaign.num_steps > 0
    recoveries = [kill.recovery_s for kill in campaign.kills if kill.recovery_s is not None]
    assert len(recoveries) > NUM_KILLS // 2
    assert max(recoveries) < BOUND_S + SHARED_CORES_S, seen


def test_a_seed_is_a_schedule_that_comes_to_every_instant() -> None:
    blows = list(islice(plan_blows(5, cast=SCRIPTED, num_victims=(1, 3)), len(SCRIPTED.instants)))
    assert blows == list(islice(plan_blows(5, cast=SCRIPTED, num_victims=(1, 3)), len(blows)))
    assert blows != list(islice(plan_blows(6, cast=SCRIPTED, num_victims=(1, 3)), len(blows)))
    reached = {(blow.at, blow.point) for blow in blows if blow.at is not None}
    points = {point for _, point in SCRIPTED.instants if point is not None}
    assert {point for _, point in reached} == points
    assert {len(blow.victims) for blow in blows} == {1, 2, 3}


Documents = Database[dict[str, Any]]


def lose_a_turn(run: Documents) -> None:
    run["Record"].update_one({"_id": f"{TRAINED}/g0"}, {"$pop": {"turn_ids": 1}, "$inc": {"num_turns": -1}})


def lose_documents(run: Documents) -> None:
    run["DispatchedSamplingTask"].delete_many({"record_id": f"{TRAINED}/g0", "turn": 0})


def change_a_turn(run: Documents) -> None:
    calls = run["DispatchedSamplingTask"].find({"kind": "tool"}, {"turn_id": 1})
    call = next(call for call in calls if call["turn_id"].startswith(f"{TRAINED}/g0/"))
    run["DispatchedSamplingTask"].update_one({"_id": call["_id"]}, {"$set": {"status": "x"}})


def double_a_record(run: Documents) -> None:
    record = run["Record"].find_one({"_id": f"{TRAINED}/g0"})
    assert record is not None
    run["Record"].insert_one({**record, "_id": f"{TRAINED}/g0 again"})


def train_twice(run: Documents) -> None:
    first = run["TrainStep"].find_one({"_id": 1})
    assert first is not None
    run["TrainStep"].update_one({"_id": 3}, {"$push": {"sequence_ids": first["sequence_ids"][0]}})


def skip_a_row(run: Documents) -> None:
    run["TrainStep"].update_one({"_id": 2}, {"$pop": {"sequence_ids": 1}})


def skip_a_group(run: Documents) -> None:
    run["Task"].update_one({"_id": LATER}, {"$set": {"status": "settled"}})


def lose_a_row(run: Documents) -> None:
    run["DBRecordData"].delete_one({"task_id": TRAINED})


@pytest.mark.parametrize(
    ("falsify", "kind"),
    [
        (lose_a_turn, "lost"),
        (lose_documents, "lost"),
        (change_a_turn, "lost"),
        (double_a_record, "duplicated"),
        (train_twice, "trained twice"),
        (skip_a_row, "skipped"),
        (skip_a_group, "skipped"),
        (lose_a_row, "skipped"),
    ],
)
async def test_the_campaigns_checks_see_every_kind_of_damage(
    mongo_store: MongoStore,
    mongo_uri: str,
    database_name: str,
    tmp_path: Path,
    falsify: Callable[[Documents], None],
    kind: str,
) -> None:
    await make_run(mongo_store, model_dir=write_tiny_chat(tmp_path / "model"), run_dir=tmp_path / "run")
    reader = Reader(mongo_uri, database=database_name)
    shadow = Shadow(reader, folder=tmp_path)
    shadow.note()

    def findings() -> dict[str, list[str]]:
        twice, skipped = check_training(reader, weights=None)
        lost = shadow.check(everything=True)
        return {"lost": lost, "duplicated": check_records(reader), "trained twice": twice, "skipped": skipped}

    assert not any(findings().values())
    with MongoClient[dict[str, Any]](mongo_uri) as client:
        falsify(client[database_name])
    assert findings()[kind]
    reader.close()
