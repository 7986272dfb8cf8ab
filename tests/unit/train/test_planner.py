import time
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from agentrl.config.sections import RunConfig
from agentrl.errors import BudgetSpentError, ConfigError, UnavailableError
from agentrl.rollout.stopping import tell_budget_spent
from agentrl.store import MemoryStore
from agentrl.train.feed import StoreFeed
from agentrl.train.planner import StepPlanner, supervised_batch
from agentrl.types import (
    DBRecordData,
    EngineQuarantine,
    EngineUse,
    GroupOutcome,
    GroupSettlement,
    SequenceSummary,
    SettledGroup,
    StepStatus,
    Task,
    TaskClaim,
)
from factories import EPOCH_START, make_task
from tiny_model import random_row, run_config

# --- supervised order -----------------------------------------------------------------------------------------------


def test_an_epoch_of_supervised_batches_sees_every_row_once_in_a_new_order() -> None:
    rows = [f"r{k:02}" for k in range(10)]

    first = [supervised_batch(rows, step=step, batch_size=4, seed=1) for step in (1, 2, 3)]
    second = [supervised_batch(rows, step=step, batch_size=4, seed=1) for step in (4, 5, 6)]

    assert [len(batch) for batch in first] == [4, 4, 2]
    for epoch in (first, second):
        assert sorted(row for batch in epoch for row in batch) == rows
    assert first != second
    assert first[0] == supervised_batch(rows, step=1, batch_size=4, seed=1)
    assert first[0] != supervised_batch(rows, step=1, batch_size=4, seed=2)


# --- the planner against a store ------------------------------------------------------------------------------------


def config_for(tmp_path: Path, **sections: dict[str, object]) -> RunConfig:
    return run_config(tmp_path, model_dir=tmp_path, **sections)


@contextmanager
def open_planner(store: MemoryStore, config: RunConfig, calls: list[tuple[str, int]] | None = None):
    async def open_store() -> MemoryStore:
        return store

    def report(phase: str, step: int) -> None:
        if calls is not None:
            calls.append((phase, step))

    with StoreFeed(open_store, timeout_s=5.0) as feed:
        yield StepPlanner(feed, config=config, num_ranks=1, report=report), feed


def settle(
    feed: StoreFeed,
    name: str,
    *,
    version: int = 0,
    outcome: GroupOutcome = GroupOutcome.TRAINABLE,
    reason: str | None = None,
    engines: tuple[EngineUse, ...] = (),
    score_version: str | None = None,
) -> list[str]:
    """Put a settled group of two Records into the store the way a sampler does; returns its row ids."""
    task = Task(id=f"train:0:{name}", item_id=name, split="train", epoch=0, query="?", answer="!", num_generations=2)
    rng = np.random.default_rng(len(name))
    rows: list[DBRecordData] = []
    if outcome is GroupOutcome.TRAINABLE:
        rows = [random_row(f"{task.id}/g{k}/s0", rng=rng, version=version, task_id=task.id) for k in range(2)]
    settlement = GroupSettlement(
        task_id=task.id,
        outcome=outcome,
        drop_reason=reason,
        rewards={f"{task.id}/g0": 1.0, f"{task.id}/g1": 0.0},
        advantages={},
        engines=engines,
        score_version=score_version,
    )

    async def write(store: MemoryStore) -> None:
        await store.insert_tasks([task])
        (claim,) = await store.claim_tasks(split="train", owner=name, lease_s=60, limit=1)
        await store.settle_task(claim, settlement, rows)

    feed.call(write)
    return [row.id for row in rows]


def test_a_plan_takes_the_oldest_groups_and_writes_the_ledger_first(tmp_path: Path) -> None:
    config = config_for(tmp_path, algo={"tasks_per_step": 2})
    with open_planner(MemoryStore(), config) as (planner, feed):
        first, second = settle(feed, "a"), settle(feed, "b")
        settle(feed, "c")

        plan = planner.plan(1)

        assert plan.entry.task_ids == ("train:0:a", "train:0:b")
        assert sorted(plan.entry.sequence_ids) == sorted(first + second)
        assert [row.id for row in plan.sequences] == list(plan.entry.sequence_ids)
        known = feed.call(lambda store: store.get_step(1))
        assert known is not None
        assert known.status is StepStatus.PLANNED
        assert known.metrics["reward"] == 0.5


def test_a_plan_in_the_ledger_is_replayed_although_other_groups_are_there(tmp_path: Path) -> None:
    config = config_for(tmp_path, algo={"tasks_per_step": 1})
    store = MemoryStore()
    with open_planner(store, config) as (planner, feed):
        settle(feed, "a")
        planned = planner.plan(1)
    with open_planner(store, config) as (planner, feed):
        settle(feed, "b")

        replayed = planner.plan(1)

        assert replayed.entry == replace(planned.entry, attempts=2, planned_at=replayed.entry.planned_at)
        assert replayed.passes == planned.passes
        assert replayed.sequences == planned.sequences


def test_stale_groups_are_dropped_by_name_and_counted(tmp_path: Path) -> None:
    config = config_for(tmp_path, algo={"tasks_per_step": 1, "max_staleness": 1})
    with open_planner(MemoryStore(), config) as (planner, feed):
        settle(feed, "old", version=1)
        settle(feed, "new", version=3)

        plan = planner.plan(5)

        assert plan.entry.task_ids == ("train:0:new",)
        assert plan.entry.metrics["num_dropped_stale"] == 1
        left = feed.call(lambda store: store.settled_groups(split="train", limit=9))
        assert "train:0:old" not in {group.settlement.task_id for group in left}


@pytest.mark.parametrize(
    ("wanted", "taken"),
    [(None, "own"), ("em", "em"), ("em @00000001", "em"), ("0.5*f1 + 0.5*em", "sum"), ("f1", None)],
)
def test_groups_settled_with_other_scores_than_wanted_are_dropped_by_name_and_counted(
    tmp_path: Path, wanted: str | None, taken: str | None
) -> None:
    versions = {"own": None, "em": "em @00000001", "sum": "0.5*f1 + 0.5*em @00000002"}
    config = config_for(tmp_path, algo={"tasks_per_step": 1, "score_version": wanted}, train={"data_timeout_s": 0.05})
    with open_planner(MemoryStore(), config) as (planner, feed):
        for name, version in versions.items():
            settle(feed, name, score_version=version)
        if taken is None:
            with pytest.raises(UnavailableError, match="3 score_version"):
                planner.plan(1)
            return
        plan = planner.plan(1)
        assert plan.entry.task_ids == (f"train:0:{taken}",)
        version = versions[taken]
        assert plan.entry.score_versions == ({} if version is None else {f"train:0:{taken}": version})


def test_a_batch_without_signal_does_not_step(tmp_path: Path) -> None:
    config = config_for(tmp_path, algo={"tasks_per_step": 2})
    with open_planner(MemoryStore(), config) as (planner, feed):
        for name in ("a", "b"):
            settle(feed, name, outcome=GroupOutcome.DROPPED, reason="zero_advantage")
        settle(feed, "c")
        settle(feed, "d", outcome=GroupOutcome.DROPPED, reason="zero_advantage")

        plan = planner.plan(1)

        assert plan.entry.task_ids == ("train:0:c", "train:0:d")
        assert dict(plan.entry.dropped) == {"train:0:d": "zero_advantage"}
        assert all(row_id.startswith("train:0:c/") for row_id in plan.entry.sequence_ids)
        assert plan.entry.metrics["num_dropped_zero_advantage"] == 2


def test_waiting_for_groups_is_bounded_reported_and_explained(tmp_path: Path) -> None:
    config = config_for(tmp_path, algo={"tasks_per_step": 2}, train={"data_timeout_s": 0.1})
    calls: list[tuple[str, int]] = []
    with open_planner(MemoryStore(), config, calls) as (planner, feed):
        settle(feed, "a")

        with pytest.raises(UnavailableError, match=r"step 1: 1 of tasks_per_step = 2 groups .* 1 settled"):
            planner.plan(1)
    assert ("wait", 1) in calls


class StaleForEver:
    """An engine that says it is current and is not: each look at the queue finds one more group that is too old."""

    def __init__(self, store: MemoryStore, *, outcome: GroupOutcome, version: int) -> None:
        self.store = store
        self.outcome = outcome
        self.version = version
        self.num_settled = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)

    async def settled_groups(self, *, split: str, limit: int) -> list[SettledGroup]:
        self.num_settled += 1
        name = f"g{self.num_settled}"
        row = SequenceSummary(id=f"{name}/g0/s0", num_tokens=4, num_trained_tokens=2, min_policy_version=self.version)
        settlement = GroupSettlement(task_id=name, outcome=self.outcome, rewards={}, advantages={})
        rows = (row,) if self.outcome is GroupOutcome.TRAINABLE else ()
        return [SettledGroup(settlement=settlement, sequences=rows, settled_at=EPOCH_START)]

    async def drop_groups(self, drops: Mapping[str, str]) -> None:
        """As if the store had them."""


@pytest.mark.parametrize(
    ("outcome", "version", "patience"),
    [(GroupOutcome.TRAINABLE, 1, 1), (GroupOutcome.DROPPED, 4, 10)],
    ids=["stale", "without signal"],
)
def test_groups_that_nobody_can_train_do_not_prolong_the_wait_for_ever(
    tmp_path: Path, outcome: GroupOutcome, version: int, patience: int
) -> None:
    timeout_s = 0.1
    config = config_for(tmp_path, algo={"tasks_per_step": 1}, train={"data_timeout_s": timeout_s})
    store = StaleForEver(MemoryStore(), outcome=outcome, version=version)
    started = time.monotonic()
    with open_planner(store, config) as (planner, _), pytest.raises(UnavailableError, match="dropped meanwhile"):
        planner.plan(5)
    assert patience * timeout_s <= time.monotonic() - started < patience * timeout_s + 2


def quarantine(*, since_s: float = 100.0, until_s: float | None = None) -> EngineQuarantine:
    return EngineQuarantine(
        id=f"e@{since_s:g}", service_id="e", policy_version=0, deviation=1.0, since_s=since_s, until_s=until_s
    )


def test_groups_a_quarantined_engine_sampled_for_are_dropped_by_name_and_counted(tmp_path: Path) -> None:
    config = config_for(tmp_path, algo={"tasks_per_step": 1})
    store = MemoryStore()
    with open_planner(store, config) as (planner, feed):
        settle(feed, "spoiled", engines=(EngineUse(service_id="e", first_s=90, last_s=101),))
        settle(feed, "other", engines=(EngineUse(service_id="f", first_s=90, last_s=101),))
        feed.call(lambda opened: opened.raise_engine_quarantine(quarantine()))

        plan = planner.plan(1)

        assert plan.entry.task_ids == ("train:0:other",)
        assert plan.entry.metrics["num_dropped_quarantined_engine"] == 1
        (raised,) = feed.call(lambda opened: opened.list_engine_quarantines())
        assert plan.entry.planned_at > raised.raised_at
        (state,) = feed.call(lambda opened: opened.find_tasks(["train:0:spoiled"]))
        assert (state.consumed_step, state.drop_reason) == (None, "quarantined_engine")


def test_a_plan_made_before_a_quarantine_is_replayed_as_it_is(tmp_path: Path) -> None:
    config = config_for(tmp_path, algo={"tasks_per_step": 1})
    store = MemoryStore()
    with open_planner(store, config) as (planner, feed):
        settle(feed, "a", engines=(EngineUse(service_id="e", first_s=90, last_s=101),))
        planned = planner.plan(1)
        feed.call(lambda opened: opened.raise_engine_quarantine(quarantine()))

        assert planner.plan(1).entry.sequence_ids == planned.entry.sequence_ids


def test_a_trainer_whose_samplers_have_spent_the_budget_ends_once_no_group_is_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(tmp_path, algo={"tasks_per_step": 1}, train={"data_timeout_s": 60})
    refusal = BudgetSpentError("budget_usd = 5 is spent")
    looks: list[tuple[str, int]] = []

    async def refuse(store: MemoryStore) -> TaskClaim:
        await store.insert_tasks([make_task("q1")])
        (claim,) = await store.claim_tasks(split="train", owner="s", lease_s=60, limit=1)
        await tell_budget_spent(store, refusal, heartbeat_s=5)
        return claim

    with open_planner(MemoryStore(), config, looks) as (planner, feed):
        claim = feed.call(refuse)
        monkeypatch.setattr(planner, "_sleep", lambda seconds: feed.call(lambda store: store.release_claim(claim)))
        with pytest.raises(BudgetSpentError, match=f"step 1: sampling was stopped: {refusal}; 0 of tasks_per_step = 1"):
            planner.plan(1)
    assert looks == [("wait", 1)]  # for the group that was running


def test_time_in_which_the_database_was_away_does_not_count_as_waiting_for_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first look takes an hour; then nothing is there, and the wait of 10 s begins."""
    now_s = 0.0
    looks = []

    class AwayStore(MemoryStore):
        async def settled_groups(self, *, split: str, limit: int) -> list[SettledGroup]:
            nonlocal now_s
            now_s += 1.0 if looks else 3600.0
            looks.append(now_s)
            return await super().settled_groups(split=split, limit=limit)

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += 4.0

    monkeypatch.setattr("agentrl.train.planner.time", SimpleNamespace(monotonic=lambda: now_s))
    config = config_for(tmp_path, algo={"tasks_per_step": 2}, train={"data_timeout_s": 10.0})
    with open_planner(AwayStore(), config) as (planner, _):
        planner._sleep = sleep
        with pytest.raises(UnavailableError, match="data_timeout_s = 10"):
            planner.plan(1)
    assert looks == [3600.0, 3605.0, 3610.0, 3615.0]


def test_supervised_plans_need_rows_and_no_tasks(tmp_path: Path) -> None:
    config = config_for(tmp_path, rollout={"enable_sampling": False}, train={"sft_batch_size": 2})
    no_rows = pytest.raises(ConfigError, match='no rows of split "train"')
    with open_planner(MemoryStore(), config) as (planner, feed), no_rows:
        planner.plan(1)
    with open_planner(MemoryStore(), config) as (planner, feed):
        rows = [random_row(f"r{k}", rng=np.random.default_rng(k)) for k in range(3)]
        rows.append(random_row("held-out", rng=np.random.default_rng(9), split="eval"))
        feed.call(lambda store: store.insert_sequences(rows))

        plans = [planner.plan(step) for step in (1, 2)]

        trained = [row_id for plan in plans for row_id in plan.entry.sequence_ids]
        assert sorted(trained) == ["r0", "r1", "r2"]
