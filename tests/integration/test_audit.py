"""The audit proves a clean run clean and finds every kind of falsified fact under its name, on every store."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from agentrl.cli.main import main
from agentrl.config.secrets import masked
from agentrl.inspector.audit import audit_run
from agentrl.inspector.audit_report import AuditReport, Check, render_audit
from agentrl.protocols import Store
from agentrl.store import MemoryStore, MongoStore, open_store
from agentrl.types import (
    BRANCH,
    DBRecordData,
    EngineQuarantine,
    GroupSettlement,
    PolicyVersion,
    Record,
    RecordStatus,
    Score,
    StepStatus,
    StopReason,
    TaskStatus,
    Turn,
    TurnTokens,
)
from audit_run import (
    CALL,
    CONFIG,
    EASY,
    EVALUATED,
    FAILED,
    HALVED,
    LATER,
    PENDING,
    PLANNED,
    TRAINED,
    Forger,
    MemoryForger,
    MongoForger,
    make_run,
    make_runner,
    sample,
    with_call,
)
from factories import EPOCH_START
from scripted_engine import ScriptedEngine
from tiny_chat import write_tiny_chat


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat(tmp_path_factory.mktemp("chat"))


class Scene:
    """A made run, and what the forgeries need of it."""

    def __init__(self, store: Store, forger: Forger, run_dir: Path) -> None:
        self.store = store
        self.forger = forger
        self.run_dir = run_dir

    async def audit(self) -> AuditReport:
        return await audit_run(self.store, config=CONFIG, run_dir=self.run_dir)

    async def tool_user(self, task_id: str = TRAINED) -> Record:
        """The Record of a group that called the tool: two turns."""
        return next(r for r in await self.store.list_records(task_id=task_id) if r.num_tool_calls)

    async def change_record(self, record: Record, **changes: object) -> None:
        await self.forger.put_record(replace(record, **changes))

    async def change_tokens(self, change: Callable[[TurnTokens], TurnTokens], *, turn: int = 0) -> None:
        found: Turn = (await self.store.load_turns(await self.tool_user()))[turn]
        await self.forger.put_turn(with_call(found, lambda call: replace(call, tokens=change(found.tokens))))

    async def change_row(self, change: Callable[[DBRecordData], DBRecordData]) -> None:
        (row,) = await self.store.load_sequences([f"{(await self.tool_user()).id}/s0"])
        await self.forger.put_row(change(row))

    async def change_settlement(self, task_id: str, change: Callable[[GroupSettlement], GroupSettlement]) -> None:
        settlement = await self.store.get_settlement(task_id)
        assert settlement is not None
        await self.forger.set_state(task_id, settlement=change(settlement))

    async def change_step(self, number: int, **changes: object) -> None:
        step = await self.store.get_step(number)
        assert step is not None
        await self.forger.put_step(replace(step, **changes))


@pytest.fixture
async def scene(memory_store: MemoryStore, model_dir: Path, tmp_path: Path) -> Scene:
    """A clean run in memory."""
    await make_run(memory_store, model_dir=model_dir, run_dir=tmp_path)
    return Scene(memory_store, MemoryForger(memory_store), tmp_path)


async def test_a_clean_run_raises_no_alarm_and_every_check_was_made(
    store: Store, model_dir: Path, tmp_path: Path
) -> None:
    await make_run(store, model_dir=model_dir, run_dir=tmp_path)
    report = await audit_run(store, config=CONFIG, run_dir=tmp_path)
    assert not [finding for result in report.results for finding in result.findings]
    assert report.is_clean
    assert all(result.num_checked for result in report.results)
    assert report.counts["tasks"] == 9
    assert report.counts["records"] == 16
    assert report.counts["steps"] == 3


async def test_the_report_survives_json_and_fits_the_terminal(scene: Scene) -> None:
    await scene.forger.remove("PolicyVersion", 1)
    report = await scene.audit()
    content = json.loads(json.dumps(report.as_json()))
    assert content["clean"] is False
    assert {check["name"] for check in content["checks"]} == {check.value for check in Check}
    assert render_audit(report) is not None


async def row_of_an_old_version(scene: Scene) -> None:
    def age(row: DBRecordData) -> DBRecordData:
        return replace(row, policy_versions=np.where(row.loss_mask, 0, -1).astype(np.int32))

    step = await scene.store.get_step(3)
    assert step is not None
    (row,) = await scene.store.load_sequences(step.sequence_ids[:1])
    await scene.forger.put_row(age(row))


async def row_of_a_version_from_the_future(scene: Scene) -> None:
    await scene.change_row(lambda row: replace(row, policy_versions=np.where(row.loss_mask, 1, -1).astype(np.int32)))


async def another_sampled_token(scene: Scene) -> None:
    await scene.change_tokens(lambda tokens: replace(tokens, completion_ids=(7, *tokens.completion_ids[1:])))


async def another_prompt_token(scene: Scene) -> None:
    await scene.change_tokens(lambda tokens: replace(tokens, prompt_ids=(*tokens.prompt_ids[:-1], 7)), turn=1)


async def a_mask_with_a_hole(scene: Scene) -> None:
    def unmask(row: DBRecordData) -> DBRecordData:
        mask = row.loss_mask.copy()
        mask[np.flatnonzero(mask)[-1]] = False
        return replace(row, loss_mask=mask)

    await scene.change_row(unmask)


async def another_logprob(scene: Scene) -> None:
    def nudge(row: DBRecordData) -> DBRecordData:
        assert row.behaviour_logprobs is not None
        return replace(row, behaviour_logprobs=row.behaviour_logprobs - row.loss_mask.astype(np.float32))

    await scene.change_row(nudge)


async def a_logprob_that_is_no_number(scene: Scene) -> None:
    def spoil(row: DBRecordData) -> DBRecordData:
        return replace(row, behaviour_logprobs=np.where(row.loss_mask, np.nan, 0).astype(np.float32))

    await scene.change_row(spoil)


async def a_trained_token_without_a_version(scene: Scene) -> None:
    await scene.change_row(lambda row: replace(row, policy_versions=np.full_like(row.policy_versions, -1)))


async def another_advantage_in_the_row(scene: Scene) -> None:
    await scene.change_row(lambda row: replace(row, advantages=2 * row.advantages))


async def a_second_record_of_a_generation(scene: Scene) -> None:
    record = await scene.tool_user()
    await scene.forger.put_record(replace(record, id=f"{record.id}-again"))


async def a_record_that_says_another_generation(scene: Scene) -> None:
    await scene.change_record(await scene.tool_user(), generation=7)


async def a_record_that_is_gone(scene: Scene) -> None:
    await scene.forger.remove("Record", (await scene.tool_user()).id)


async def a_shortfall_that_is_not_one(scene: Scene) -> None:
    await scene.change_settlement(TRAINED, lambda settlement: replace(settlement, num_failed=1))


async def a_settled_group_without_a_settlement(scene: Scene) -> None:
    await scene.forger.set_state(PENDING, status=TaskStatus.SETTLED)


async def another_score(scene: Scene) -> None:
    await scene.change_record(await scene.tool_user(), score=0.5)


async def another_advantage(scene: Scene) -> None:
    await scene.change_settlement(
        TRAINED, lambda s: replace(s, advantages={name: -value for name, value in s.advantages.items()})
    )


async def a_failure_counted_as_zero(scene: Scene) -> None:
    (failed,) = [r for r in await scene.store.list_records(task_id=FAILED) if r.status is RecordStatus.FAILED]
    await scene.change_settlement(FAILED, lambda s: replace(s, rewards={**s.rewards, failed.id: 0.0}))


async def an_invented_drop_reason(scene: Scene) -> None:
    await scene.change_settlement(FAILED, lambda settlement: replace(settlement, drop_reason="bad_luck"))


async def other_totals_in_the_ledger(scene: Scene) -> None:
    step = await scene.store.get_step(1)
    assert step is not None
    await scene.change_step(1, metrics={**step.metrics, "num_trained_tokens": 1.0})


async def a_row_in_two_steps(scene: Scene) -> None:
    first, second = await scene.store.get_step(1), await scene.store.get_step(2)
    assert first is not None
    assert second is not None
    await scene.change_step(2, sequence_ids=(*second.sequence_ids, first.sequence_ids[0]))


async def a_group_in_two_steps(scene: Scene) -> None:
    step = await scene.store.get_step(2)
    assert step is not None
    await scene.change_step(2, task_ids=(*step.task_ids, TRAINED), dropped={**step.dropped, TRAINED: "stale"})


async def a_consumed_group_without_a_reason(scene: Scene) -> None:
    await scene.forger.set_state(EASY, drop_reason=None)


async def a_step_that_left_a_row_out(scene: Scene) -> None:
    step = await scene.store.get_step(1)
    assert step is not None
    await scene.change_step(1, sequence_ids=step.sequence_ids[1:])


async def a_step_of_an_unknown_row(scene: Scene) -> None:
    step = await scene.store.get_step(1)
    assert step is not None
    await scene.change_step(1, sequence_ids=(*step.sequence_ids, "train:9:nowhere/g0/s0"))


async def a_step_of_an_unknown_group(scene: Scene) -> None:
    step = await scene.store.get_step(1)
    assert step is not None
    await scene.change_step(1, task_ids=(*step.task_ids, "train:9:nowhere"))


async def a_trained_row_that_is_gone(scene: Scene) -> None:
    await scene.forger.remove("DBRecordData", f"{(await scene.tool_user()).id}/s0")


async def a_committed_step_whose_group_is_not_consumed(scene: Scene) -> None:
    await scene.forger.set_state(LATER, status=TaskStatus.SETTLED)


async def a_missing_step(scene: Scene) -> None:
    await scene.forger.remove("TrainStep", 1)


async def an_open_step_in_the_middle(scene: Scene) -> None:
    await scene.change_step(1, status=StepStatus.PLANNED)


async def a_step_of_another_version(scene: Scene) -> None:
    await scene.change_step(3, policy_version=1)


async def an_unknown_checkpoint(scene: Scene) -> None:
    shutil.copytree(scene.run_dir / "checkpoints" / "step_2", scene.run_dir / "checkpoints" / "step_9")


async def a_lost_checkpoint(scene: Scene) -> None:
    shutil.rmtree(scene.run_dir / "checkpoints")


async def a_damaged_checkpoint(scene: Scene) -> None:
    state = scene.run_dir / "checkpoints" / "step_2" / "checkpoint.json"
    state.write_text(json.dumps({"step": 2, "sizes": {"model.safetensors": 12}}))


async def a_published_version_without_a_step(scene: Scene) -> None:
    await scene.forger.remove("TrainStep", 3)
    await scene.change_step(2, status=StepStatus.PLANNED)
    await scene.forger.remove("TrainStep", 2)


async def a_lease_nobody_keeps(scene: Scene) -> None:
    lease_until = await scene.store.server_time() - timedelta(seconds=CONFIG.store.lease_s + 3)
    await scene.forger.set_state(PENDING, status=TaskStatus.RUNNING, lease_until=lease_until)


async def a_running_record_of_a_settled_group(scene: Scene) -> None:
    record = (await scene.store.list_records(task_id=EVALUATED))[0]
    await scene.change_record(record, status=RecordStatus.RUNNING, stop_reason=None, score=None)


async def a_model_call_that_is_gone(scene: Scene) -> None:
    await scene.forger.remove("DispatchedSamplingTask", (await scene.tool_user()).turn_ids[1])


async def a_tool_call_that_is_gone(scene: Scene) -> None:
    await scene.forger.remove("DispatchedSamplingTask", f"{(await scene.tool_user()).turn_ids[0]}/1")


async def turns_in_another_order(scene: Scene) -> None:
    record = await scene.tool_user()
    await scene.change_record(record, turn_ids=record.turn_ids[::-1])


async def a_turn_under_a_fence_that_never_was(scene: Scene) -> None:
    record = await scene.tool_user()
    await scene.change_record(record, fence=0)


async def a_version_span_that_ends_early(scene: Scene) -> None:
    await scene.change_tokens(
        lambda t: replace(t, version_spans=(replace(t.version_spans[0], end=t.version_spans[0].end - 1),))
    )


async def a_call_that_ended_before_it_began(scene: Scene) -> None:
    turn = (await scene.store.load_turns(await scene.tool_user()))[0]
    await scene.forger.put_turn(with_call(turn, lambda call: replace(call, finished_at=EPOCH_START)))


async def a_branch_that_nobody_recorded(scene: Scene) -> None:
    await scene.change_tokens(lambda t: replace(t, parent_turn=-1), turn=1)


async def a_recorded_branch_that_is_none(scene: Scene) -> None:
    turn = (await scene.store.load_turns(await scene.tool_user()))[1]
    branch = {BRANCH: {"strategy": "last_k", "because": "context_limit"}}
    await scene.forger.put_turn(with_call(turn, lambda call: replace(call, request={**call.request, **branch})))


async def a_branch_from_another_question(scene: Scene) -> None:
    await a_branch_that_nobody_recorded(scene)
    await a_recorded_branch_that_is_none(scene)


async def another_token_counter(scene: Scene) -> None:
    record = await scene.tool_user()
    await scene.change_record(record, num_completion_tokens=record.num_completion_tokens + 1)


async def another_tool_counter(scene: Scene) -> None:
    await scene.change_record(await scene.tool_user(), num_tool_calls=0)


async def another_cost(scene: Scene) -> None:
    await scene.change_record(await scene.tool_user(), cost_nano_usd=1)


async def a_failed_record_with_a_score(scene: Scene) -> None:
    (failed,) = [r for r in await scene.store.list_records(task_id=FAILED) if r.status is RecordStatus.FAILED]
    await scene.change_record(failed, score=0.0)


async def a_failure_blamed_on_the_policy(scene: Scene) -> None:
    (failed,) = [r for r in await scene.store.list_records(task_id=FAILED) if r.status is RecordStatus.FAILED]
    await scene.change_record(failed, stop_reason=StopReason.MAX_TURNS)


async def a_finished_record_without_a_score(scene: Scene) -> None:
    await scene.change_record(await scene.tool_user(), score=None)


async def a_version_nobody_published(scene: Scene) -> None:
    await scene.change_tokens(lambda t: replace(t, version_spans=(replace(t.version_spans[0], version=8),)))


async def a_committed_turn_that_was_refused(scene: Scene) -> None:
    await scene.forger.refuse((await scene.tool_user()).turn_ids[0])


async def a_trained_row_of_refused_work(scene: Scene) -> None:
    (late, *_) = [turn_id for work in await scene.store.list_quarantined() for turn_id in work.ids]
    record = await scene.tool_user(PLANNED)
    (row,) = await scene.store.load_sequences([f"{record.id}/s0"])
    await scene.forger.put_row(replace(row, turn_ids=(late, *row.turn_ids[1:])))


def quarantine(*, raised_at: datetime) -> EngineQuarantine:
    """Of the engine that sampled the whole run, since its first token."""
    return EngineQuarantine(
        id="scripted@0", service_id="scripted", policy_version=0, deviation=3.0, since_s=0.0, raised_at=raised_at
    )


async def a_step_on_tokens_of_a_quarantined_engine(scene: Scene) -> None:
    step = await scene.store.get_step(1)
    assert step is not None
    assert step.planned_at is not None
    await scene.forger.put_quarantine(quarantine(raised_at=step.planned_at - timedelta(seconds=2)))


async def a_settlement_that_hides_its_engine(scene: Scene) -> None:
    await scene.change_settlement(
        TRAINED, lambda s: replace(s, engines=tuple(replace(use, last_s=use.first_s) for use in s.engines))
    )


async def score_of(scene: Scene) -> Score:
    """Of the right Record of the group that was settled with another version."""
    settlement = await scene.store.get_settlement(HALVED)
    assert settlement is not None
    version = settlement.score_version
    assert version is not None
    found = await scene.store.find_scores([await scene.tool_user(HALVED)], version=version)
    return next(iter(found.values()))


async def another_score_of_the_version(scene: Scene) -> None:
    await scene.forger.put_score(replace(await score_of(scene), value=0.25))


async def a_version_nobody_gave(scene: Scene) -> None:
    await scene.change_settlement(HALVED, lambda s: replace(s, score_version="f1 @00000000"))


async def own_scores_said_to_be_trained(scene: Scene) -> None:
    await scene.change_settlement(HALVED, lambda s: replace(s, score_version=None))


async def a_record_whose_score_was_left_out(scene: Scene) -> None:
    score = await score_of(scene)
    await scene.forger.put_score(replace(score, scored_at=EPOCH_START))

    def without(numbers: Mapping[str, float]) -> dict[str, float]:
        return {record_id: value for record_id, value in numbers.items() if record_id != score.record_id}

    await scene.change_settlement(
        HALVED,
        lambda s: replace(
            s, num_failed=1, scores=without(s.scores), rewards=without(s.rewards), advantages=without(s.advantages)
        ),
    )


async def a_row_of_another_version(scene: Scene) -> None:
    (row,) = await scene.store.load_sequences([f"{(await scene.tool_user(HALVED)).id}/s0"])
    await scene.forger.put_row(replace(row, score_version="em @00000000"))


async def a_row_that_names_a_version_its_group_does_not(scene: Scene) -> None:
    await scene.change_row(lambda row: replace(row, score_version="em @00000000"))


async def a_step_that_says_another_version(scene: Scene) -> None:
    await scene.change_step(3, score_versions={HALVED: "em @00000000"})


async def a_step_that_hides_the_version(scene: Scene) -> None:
    await scene.change_step(3, score_versions={})


Forgery = Callable[[Scene], Awaitable[None]]
FORGERIES: list[tuple[Check, Forgery]] = [
    (Check.STALENESS, row_of_an_old_version),
    (Check.STALENESS, row_of_a_version_from_the_future),
    (Check.TOKEN_EXACTNESS, row_of_an_old_version),
    (Check.TOKEN_EXACTNESS, another_sampled_token),
    (Check.TOKEN_EXACTNESS, another_prompt_token),
    (Check.TOKEN_EXACTNESS, a_mask_with_a_hole),
    (Check.TOKEN_EXACTNESS, another_logprob),
    (Check.TRAINED_TOKENS, a_logprob_that_is_no_number),
    (Check.TRAINED_TOKENS, a_trained_token_without_a_version),
    (Check.STEP_TOTALS, another_advantage_in_the_row),
    (Check.STEP_TOTALS, a_mask_with_a_hole),
    (Check.STEP_TOTALS, other_totals_in_the_ledger),
    (Check.RECORD_IDENTITY, a_second_record_of_a_generation),
    (Check.RECORD_IDENTITY, a_record_that_says_another_generation),
    (Check.RECORD_IDENTITY, a_turn_under_a_fence_that_never_was),
    (Check.GROUP_COMPLETENESS, a_record_that_is_gone),
    (Check.GROUP_COMPLETENESS, a_shortfall_that_is_not_one),
    (Check.GROUP_COMPLETENESS, a_settled_group_without_a_settlement),
    (Check.SETTLEMENT, another_score),
    (Check.SETTLEMENT, another_advantage),
    (Check.SETTLEMENT, a_failure_counted_as_zero),
    (Check.SETTLEMENT, an_invented_drop_reason),
    (Check.CONSUMPTION, a_row_in_two_steps),
    (Check.CONSUMPTION, a_group_in_two_steps),
    (Check.CONSUMPTION, a_consumed_group_without_a_reason),
    (Check.CONSUMPTION, a_step_that_left_a_row_out),
    (Check.CONSUMPTION, a_step_of_an_unknown_row),
    (Check.CONSUMPTION, a_step_of_an_unknown_group),
    (Check.CONSUMPTION, a_trained_row_that_is_gone),
    (Check.CONSUMPTION, a_committed_step_whose_group_is_not_consumed),
    (Check.CONSUMPTION, a_missing_step),
    (Check.LEDGER, a_missing_step),
    (Check.LEDGER, an_open_step_in_the_middle),
    (Check.LEDGER, a_step_of_another_version),
    (Check.LEDGER, an_unknown_checkpoint),
    (Check.LEDGER, a_lost_checkpoint),
    (Check.LEDGER, a_damaged_checkpoint),
    (Check.LEDGER, a_published_version_without_a_step),
    (Check.LEASES, a_lease_nobody_keeps),
    (Check.LEASES, a_running_record_of_a_settled_group),
    (Check.TURN_CHAIN, a_model_call_that_is_gone),
    (Check.TURN_CHAIN, turns_in_another_order),
    (Check.TURN_CHAIN, a_turn_under_a_fence_that_never_was),
    (Check.TURN_CHAIN, a_version_span_that_ends_early),
    (Check.TURN_CHAIN, a_call_that_ended_before_it_began),
    (Check.TURN_CHAIN, a_branch_that_nobody_recorded),
    (Check.TURN_CHAIN, a_recorded_branch_that_is_none),
    (Check.TURN_CHAIN, a_branch_from_another_question),
    (Check.COUNTERS, a_tool_call_that_is_gone),
    (Check.COUNTERS, another_token_counter),
    (Check.COUNTERS, another_tool_counter),
    (Check.COUNTERS, another_cost),
    (Check.OUTCOMES, a_failed_record_with_a_score),
    (Check.OUTCOMES, a_failure_blamed_on_the_policy),
    (Check.OUTCOMES, a_finished_record_without_a_score),
    (Check.POLICY_VERSIONS, a_version_nobody_published),
    (Check.LATE_WORK, a_committed_turn_that_was_refused),
    (Check.LATE_WORK, a_trained_row_of_refused_work),
    (Check.QUARANTINED_ENGINES, a_step_on_tokens_of_a_quarantined_engine),
    (Check.SETTLEMENT, a_settlement_that_hides_its_engine),
    (Check.SETTLEMENT, another_score_of_the_version),
    (Check.SETTLEMENT, a_version_nobody_gave),
    (Check.SETTLEMENT, own_scores_said_to_be_trained),
    (Check.GROUP_COMPLETENESS, a_record_whose_score_was_left_out),
    (Check.SCORE_VERSIONS, a_version_nobody_gave),
    (Check.SCORE_VERSIONS, own_scores_said_to_be_trained),
    (Check.SCORE_VERSIONS, a_row_of_another_version),
    (Check.SCORE_VERSIONS, a_row_that_names_a_version_its_group_does_not),
    (Check.SCORE_VERSIONS, a_step_that_says_another_version),
    (Check.SCORE_VERSIONS, a_step_that_hides_the_version),
]


@pytest.mark.parametrize(("check", "forgery"), FORGERIES, ids=lambda value: getattr(value, "__name__", str(value)))
async def test_a_falsified_fact_is_found_under_its_name(scene: Scene, check: Check, forgery: Forgery) -> None:
    await forgery(scene)
    report = await scene.audit()
    assert check.value in report.found, report.as_json()


async def test_every_falsified_fact_is_found_in_a_database_as_well(
    mongo_store: MongoStore, mongo_uri: str, database_name: str, model_dir: Path, tmp_path: Path
) -> None:
    await make_run(mongo_store, model_dir=model_dir, run_dir=tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "kept")
    forger = MongoForger(mongo_uri, database_name)
    scene = Scene(mongo_store, forger, tmp_path / "run")
    missed = []
    for check, forgery in FORGERIES:
        await forgery(scene)
        if check.value not in (await scene.audit()).found:
            missed.append(forgery.__name__)
        forger.restore()
        shutil.rmtree(tmp_path / "run")
        shutil.copytree(tmp_path / "kept", tmp_path / "run")
    assert not missed
    assert (await scene.audit()).is_clean


async def test_what_was_planned_before_a_quarantine_or_sampled_outside_it_is_no_finding(scene: Scene) -> None:
    await scene.forger.put_quarantine(quarantine(raised_at=await scene.store.server_time() + timedelta(seconds=1)))
    assert (await scene.audit()).is_clean
    healed = replace(quarantine(raised_at=EPOCH_START), until_s=1.0)
    await scene.forger.put_quarantine(healed)
    assert (await scene.audit()).is_clean


async def test_tokens_older_than_the_bound_are_found_whatever_the_ledger_says(scene: Scene) -> None:
    strict = CONFIG.model_copy(update={"algo": CONFIG.algo.model_copy(update={"max_staleness": 0})})
    step = await scene.store.get_step(2)
    assert step is not None
    before = await audit_run(scene.store, config=strict, run_dir=None)
    assert "staleness" in before.found  # step 3 trains v2 on tokens of v1, which a bound of 1 allows
    assert "staleness" not in (await scene.audit()).found


async def test_a_group_may_be_trained_again_where_the_settings_and_the_ledger_say_so(scene: Scene) -> None:
    first, second = await scene.store.get_step(1), await scene.store.get_step(2)
    assert first is not None
    assert second is not None
    again = [row_id for row_id in first.sequence_ids if row_id.startswith(f"{TRAINED}/")]
    await scene.change_step(2, task_ids=(*second.task_ids, TRAINED), sequence_ids=(*second.sequence_ids, *again))
    await scene.forger.set_state(TRAINED, consumed_step=2)
    twice = CONFIG.model_copy(update={"algo": CONFIG.algo.model_copy(update={"max_trained_count": 2})})
    assert "consumption" in (await audit_run(scene.store, config=twice, run_dir=None)).found
    await scene.change_step(1, retained=(TRAINED,))
    assert "consumption" not in (await audit_run(scene.store, config=twice, run_dir=None)).found
    assert "consumption" in (await scene.audit()).found


async def test_recorded_branches_are_clean_and_without_their_mark_they_are_findings(
    store: Store, model_dir: Path, tmp_path: Path
) -> None:
    rollout = CONFIG.rollout.model_copy(
        update={"new_context": "last_k", "max_prompt_tokens": 900, "max_turns": 9, "force_final_answer": True}
    )
    config = CONFIG.model_copy(update={"rollout": rollout})

    answers = iter(["<answer>5</answer>", "<answer>6</answer>"])

    def script(context: str, depth: int) -> str:
        if "last turn" in context:
            return next(answers)
        return f'{{"{context.count("<tool_response>")}"}} {CALL}'

    runner = make_runner(store, ScriptedEngine(model_dir, script), model_dir, config=config)
    await store.publish_policy(PolicyVersion(version=0, path="v0"))
    await sample(store, runner, "q0")
    report = await audit_run(store, config=config, run_dir=None)
    assert report.is_clean, report.as_json()
    assert report.counts["rows"] > 2
    record = (await store.list_records(task_id=TRAINED))[0]
    turns = await store.load_turns(record)
    branch = next(turn for turn in turns if BRANCH in turn.model.request)
    assert branch.tokens.parent_turn == -1
    assert branch.index > 0


async def test_a_fault_in_many_places_is_counted_in_full_and_listed_in_part(scene: Scene) -> None:
    for record in await scene.store.list_records(limit=100):
        await scene.change_record(record, num_completion_tokens=-1, num_prompt_tokens=-1)
    report = await scene.audit()
    (counters,) = [result for result in report.results if result.check is Check.COUNTERS]
    assert counters.num_findings == 32
    assert len(counters.findings) == 20


async def test_documents_that_cannot_be_read_are_findings_and_stop_nothing(
    mongo_store: MongoStore, mongo_uri: str, database_name: str, model_dir: Path, tmp_path: Path
) -> None:
    await make_run(mongo_store, model_dir=model_dir, run_dir=tmp_path)
    forger = MongoForger(mongo_uri, database_name)
    forger.database["Record"].update_one({"_id": f"{EASY}/g0"}, {"$set": {"stop_reason": "bad_luck"}})
    forger.database["Task"].update_one({"_id": PENDING}, {"$unset": {"query": ""}})
    forger.database["DBRecordData"].update_one({"_id": f"{LATER}/g0/s0"}, {"$unset": {"payload": ""}})
    turn_id = (await mongo_store.list_records(task_id=TRAINED))[0].turn_ids[0]
    forger.database["DispatchedSamplingTask"].update_one({"_id": turn_id}, {"$set": {"payload.encoding": "lost"}})
    forger.database["DispatchedSamplingTask"].update_one({"_id": turn_id}, {"$unset": {"tokens.parent_turn": ""}})
    report = await audit_run(mongo_store, config=CONFIG, run_dir=tmp_path)
    subjects = {finding.subject for result in report.results for finding in result.findings}
    assert {f"{EASY}/g0", PENDING, f"{LATER}/g0/s0", turn_id} <= subjects


def test_the_command_prints_a_report_and_its_exit_code_says_whether_anything_was_found(
    mongo_uri: str,
    database_name: str,
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "output" / database_name
    command = ["audit", database_name, "--db_connection_string", mongo_uri]

    async def prepare() -> None:
        store = open_store(mongo_uri, database=database_name)
        await store.prepare()
        await store.put_run({"config": masked(CONFIG)})
        await make_run(store, model_dir=model_dir, run_dir=run_dir)
        await store.close()

    assert main(command) == 2  # nothing there yet
    asyncio.run(prepare())
    assert main(command) == 0
    assert "no findings" in capsys.readouterr().out
    MongoForger(mongo_uri, database_name).database["PolicyVersion"].delete_one({"_id": 1})
    assert main([*command, "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert {check["name"] for check in content["checks"] if check["num_findings"]} == {"ledger", "policy_versions"}
