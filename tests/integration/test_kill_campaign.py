"""Some fifty kills of samplers, engines, trainer and database: the short mode of benchmarks/kill_campaign.py."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from kill_campaign import BOUND_S, Campaign, run_campaign
from kill_plan import SCRIPTED, plan_blows

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
