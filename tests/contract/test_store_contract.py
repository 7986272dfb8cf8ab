"""What agentrl.protocols.Store promises, checked against every implementation (fixture `store`)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest

from agentrl.algo.trie import summarise_group
from agentrl.errors import StaleClaimError, StoreError
from agentrl.protocols import Store
from agentrl.types import (
    Alarm,
    CanaryAnswer,
    CanaryReference,
    DBRecordData,
    EngineQuarantine,
    EpisodeResult,
    GroupOutcome,
    InferenceService,
    PolicyVersion,
    Record,
    RecordStatus,
    ServiceStatus,
    StepStatus,
    StopReason,
    Task,
    TaskClaim,
    TaskStatus,
    ToolStatus,
    TrainStep,
    Turn,
    Worker,
)
from factories import make_record, make_sequence, make_settlement, make_task, make_turn

LONG_S = 3600.0
EXPIRED_S = -1.0  # a lease that ended a second ago


async def claim(store: Store, *, limit: int = 1, lease_s: float = LONG_S, owner: str = "worker-0") -> list[TaskClaim]:
    return await store.claim_tasks(split="train", owner=owner, lease_s=lease_s, limit=limit)


async def claimed(store: Store, task: Task | None = None, *, lease_s: float = LONG_S) -> TaskClaim:
    await store.insert_tasks([task or make_task()])
    (taken,) = await claim(store, lease_s=lease_s)
    return taken


async def taken_over(store: Store) -> TaskClaim:
    """A new claim of the one Task, whose earlier claim has expired."""
    await store.reap_expired_claims(split="train")
    (taken,) = await claim(store, owner="worker-1")
    return taken


def finished(record: Record, *, score: float = 1.0) -> Record:
    return replace(
        record,
        status=RecordStatus.FINISHED,
        stop_reason=StopReason.ANSWER,
        answer="2",
        score=score,
        scorer="em",
        turn_scores=(None, 0.5),
        episodes=(
            EpisodeResult(
                answer="2",
                score=0.5,
                stop_reason=StopReason.ANSWER,
                num_turns=2,
                num_tool_calls=1,
                num_completion_tokens=4,
            ),
        ),
        worker="worker-0",
    )


async def settled(store: Store, task: Task, *, rewards: tuple[float, ...] = (1.0, 0.0)) -> list[DBRecordData]:
    """Take `task`, which must be the next pending one, through to settled; returns its rows."""
    taken = await claimed(store, task)
    rows = []
    for record, reward in zip(await store.open_records(taken), rewards, strict=True):
        extended = await store.commit_turn(record, make_turn(record))
        await store.finish_record(finished(extended, score=reward))
        rows.append(make_sequence(extended, reward=reward, advantage=reward - 0.5))
    await store.settle_task(taken, make_settlement(task, rewards=rewards), rows)
    return rows


def planned(step: int, *, task_ids: tuple[str, ...], sequence_ids: tuple[str, ...] = ()) -> TrainStep:
    return TrainStep(
        step=step,
        status=StepStatus.PLANNED,
        policy_version=step - 1,
        task_ids=task_ids,
        sequence_ids=sequence_ids,
    )


# --- claims -------------------------------------------------------------------------------------------------------


async def test_inserting_tasks_again_adds_only_the_new_ones(store: Store) -> None:
    assert await store.insert_tasks([make_task("a"), make_task("b")]) == 2
    assert await store.insert_tasks([make_task("b"), make_task("c")]) == 1
    assert (await store.count_tasks(split="train"))[TaskStatus.PENDING] == 3


async def test_a_task_reads_back_as_it_was_inserted(store: Store) -> None:
    task = replace(
        make_task("a.b$c"),
        answer={"values": [1, 2.5, None, True], "$ref": "x", "big": 2**80},
        system_prompt="Think.\nThen answer.",
        query_prompt="Q: {query}",
        tools=("calculator.calculate", "search"),
        metadata={"source.name": "unit", "level": 3},
    )
    await store.insert_tasks([task])
    assert await store.get_task(task.id) == task


async def test_claims_take_the_lowest_epoch_first(store: Store) -> None:
    await store.insert_tasks([make_task(str(i), epoch=epoch) for i, epoch in enumerate([2, 0, 1, 0, 5])])
    epochs = [(await claim(store))[0].task.epoch for _ in range(5)]
    assert epochs == [0, 0, 1, 2, 5]


async def test_a_task_given_back_in_an_earlier_epoch_comes_first_again(store: Store) -> None:
    await store.insert_tasks([make_task("a", epoch=0), make_task("b", epoch=1), make_task("c", epoch=1)])
    first, _ = await claim(store, limit=2)
    await store.release_claim(first)
    assert [taken.task.epoch for taken in await claim(store, limit=2)] == [0, 1]


@pytest.mark.parametrize("gives_back", ["reaper", "owner"])
async def test_a_task_given_back_is_claimed_before_those_that_wait_unbegun(store: Store, gives_back: str) -> None:
    await store.insert_tasks([make_task(str(k), epoch=1) for k in range(300)])
    begun = await claim(store, limit=2, lease_s=EXPIRED_S)
    await store.insert_tasks([make_task(f"earlier {k}", epoch=0) for k in range(20)])
    if gives_back == "reaper":
        await store.reap_expired_claims(split="train")
    for lost in begun if gives_back == "owner" else ():
        await store.release_claim(lost)
    again = await claim(store, limit=3)
    assert {taken.task.id for taken in again[:2]} == {taken.task.id for taken in begun}
    assert again[2].task.epoch == 0


async def test_one_claim_call_takes_up_to_its_limit_and_then_nothing_is_left(store: Store) -> None:
    await store.insert_tasks([make_task(str(i)) for i in range(40)])
    claims = [*await claim(store, limit=25), *await claim(store, limit=25)]
    assert len({taken.task.id for taken in claims}) == 40
    assert await claim(store, limit=25) == []


async def test_a_claim_carries_the_task_its_lease_and_its_first_fence(store: Store) -> None:
    task = make_task()
    before = await store.server_time()
    taken = await claimed(store, task, lease_s=60)
    assert taken.task == task
    assert taken.fence == 1
    assert timedelta(seconds=55) < taken.lease_until - before < timedelta(seconds=65)


async def test_claims_see_only_their_split(store: Store) -> None:
    await store.insert_tasks([make_task("a", split="eval")])
    assert await claim(store) == []


async def test_concurrent_claimers_never_get_the_same_task(store: Store) -> None:
    await store.insert_tasks([make_task(str(i)) for i in range(30)])
    claims = await asyncio.gather(*(claim(store, limit=4, owner=f"worker-{i}") for i in range(12)))
    ids = [taken.task.id for batch in claims for taken in batch]
    assert len(ids) == len(set(ids)) == 30


async def test_an_expired_claim_returns_to_pending_and_the_next_fence_is_higher(store: Store) -> None:
    first = await claimed(store, lease_s=EXPIRED_S)
    assert await store.reap_expired_claims(split="train") == [first.task.id]
    assert await store.reap_expired_claims(split="train") == []
    (second,) = await claim(store)
    assert second.fence > first.fence
    assert second.owner != first.owner


async def test_a_live_claim_is_not_reaped(store: Store) -> None:
    await claimed(store)
    assert await store.reap_expired_claims(split="train") == []


async def test_a_renewed_claim_is_not_reaped(store: Store) -> None:
    taken = await claimed(store, lease_s=EXPIRED_S)
    assert await store.renew_claims([taken], lease_s=LONG_S) == []
    assert await store.reap_expired_claims(split="train") == []


async def test_renewing_names_the_lost_claims_and_keeps_the_others(store: Store) -> None:
    await store.insert_tasks([make_task("a"), make_task("b")])
    kept, lost = await claim(store, limit=2)
    await store.release_claim(lost)
    assert await store.renew_claims([kept, lost], lease_s=LONG_S) == [lost.task.id]


async def test_renewing_a_claim_that_another_worker_holds_now_leaves_that_one_alone(store: Store) -> None:
    old = await claimed(store, lease_s=EXPIRED_S)
    new = await taken_over(store)
    assert await store.renew_claims([old], lease_s=LONG_S) == [old.task.id]
    assert await store.renew_claims([new], lease_s=LONG_S) == []


async def test_releasing_a_lost_claim_does_not_take_the_task_from_its_new_owner(store: Store) -> None:
    old = await claimed(store, lease_s=EXPIRED_S)
    new = await taken_over(store)
    await store.release_claim(old)
    assert await store.renew_claims([new], lease_s=LONG_S) == []


async def test_counts_follow_a_task_through_its_life(store: Store) -> None:
    await store.insert_tasks([make_task("z", epoch=9)])
    rows = await settled(store, make_task("a"))
    await claim(store)
    await store.insert_tasks([make_task("y")])
    expected = {TaskStatus.PENDING: 1, TaskStatus.RUNNING: 1, TaskStatus.SETTLED: 1}
    assert await store.count_tasks(split="train") == expected
    await store.drop_groups({rows[0].task_id: "too old"})
    assert (await store.count_tasks(split="train"))[TaskStatus.SETTLED] == 0


# --- records and turns --------------------------------------------------------------------------------------------


async def test_opening_creates_the_group_once(store: Store) -> None:
    taken = await claimed(store, make_task(num_generations=3))
    records = await store.open_records(taken)
    assert [record.id for record in records] == [f"{taken.task.id}/g{k}" for k in range(3)]
    assert {record.fence for record in records} == {taken.fence}
    assert await store.open_records(taken) == records


async def test_opening_after_a_takeover_keeps_turns_and_final_records_and_raises_the_fence_of_the_rest(
    store: Store,
) -> None:
    old = await claimed(store, lease_s=EXPIRED_S)
    done, unfinished = await store.open_records(old)
    done = await store.commit_turn(done, make_turn(done))
    await store.finish_record(finished(done))
    unfinished = await store.commit_turn(unfinished, make_turn(unfinished))
    new = await taken_over(store)
    reopened_done, reopened = await store.open_records(new)
    assert reopened_done.status is RecordStatus.FINISHED
    assert reopened_done.fence == old.fence
    assert reopened.fence == new.fence
    assert reopened.turn_ids == unfinished.turn_ids


async def test_opening_with_a_lost_claim_is_refused(store: Store) -> None:
    old = await claimed(store, lease_s=EXPIRED_S)
    await taken_over(store)
    with pytest.raises(StaleClaimError):
        await store.open_records(old)


async def test_committed_turns_read_back_equal_and_in_order(store: Store) -> None:
    record, _ = await store.open_records(await claimed(store))
    first = make_turn(record, tool_results=("3", "4"))
    record = await store.commit_turn(record, first)
    second = make_turn(record, prompt_ids=(8, 9), completion_ids=(10,), version=7)
    record = await store.commit_turn(record, second)
    assert await store.load_turns(record) == [first, second]
    assert await store.get_record(record.id) == record


async def test_the_header_counts_the_longest_context_and_what_was_sampled(store: Store) -> None:
    record, _ = await store.open_records(await claimed(store))
    record = await store.commit_turn(record, make_turn(record, prompt_ids=range(8), tool_results=("a", "b")))
    record = await store.commit_turn(record, make_turn(record, prompt_ids=range(3)))
    record = await store.commit_turn(record, make_turn(record, prompt_ids=range(4), parent_turn=-1))
    record = await store.commit_turn(record, make_turn(record, prompt_ids=range(5), parent_turn=0))
    assert record.turn_prompt_tokens == (8, 11, 4, 13)
    assert (record.num_prompt_tokens, record.num_completion_tokens, record.num_tool_calls) == (13, 8, 2)
    assert await store.get_record(record.id) == record


async def test_whatever_a_model_writes_reads_back_equal(store: Store) -> None:
    record, _ = await store.open_records(await claimed(store))
    turn = make_turn(record, tool_results=("x",), text="a\x00b \ud800 é 你好")
    arguments = {"$where": 1, "a.b": {"": [2**70, float("inf"), None]}, "text": "\udfff"}
    tool = replace(
        turn.tools[0],
        target="no such tool \ud800",
        status=ToolStatus.UNKNOWN_TOOL,
        request={"name": "no such tool \ud800", "arguments": arguments, "call_id": "c"},
        error="unknown tool \ud800",
    )
    turn = Turn(model=turn.model, tools=(tool,))
    record = await store.commit_turn(record, turn)
    assert await store.load_turns(record) == [turn]


async def test_a_turn_far_above_the_document_limit_reads_back_equal(store: Store) -> None:
    record, _ = await store.open_records(await claimed(store))
    noise = np.random.default_rng(0)
    turn = make_turn(
        record,
        prompt_ids=noise.integers(0, 2**31 - 1, 2_500_000).tolist(),
        completion_ids=noise.integers(0, 150_000, 1000).tolist(),
        logprobs=noise.standard_normal(1000).astype(np.float32).tolist(),
        tool_results=("page " * 1_000_000,),
    )
    record = await store.commit_turn(record, turn)
    assert await store.load_turns(record) == [turn]


async def test_committing_the_same_turn_again_changes_nothing(store: Store) -> None:
    record, _ = await store.open_records(await claimed(store))
    turn = make_turn(record, tool_results=("3",))
    once = await store.commit_turn(record, turn)
    assert await store.commit_turn(record, turn) == once
    assert await store.get_record(record.id) == once


async def test_sampling_the_same_turn_twice_under_one_claim_is_an_error_and_keeps_the_first(store: Store) -> None:
    record, _ = await store.open_records(await claimed(store))
    turn = make_turn(record)
    once = await store.commit_turn(record, turn)
    with pytest.raises(StoreError, match="other content"):
        await store.commit_turn(record, make_turn(record, completion_ids=(6, 6)))
    assert await store.load_turns(once) == [turn]


async def test_a_turn_that_does_not_follow_the_committed_ones_is_refused(store: Store) -> None:
    record, _ = await store.open_records(await claimed(store))
    with pytest.raises(ValueError, match="index 1"):
        await store.commit_turn(record, make_turn(record, index=1))


async def test_a_turn_under_an_old_fence_is_refused_and_never_loaded(store: Store) -> None:
    old = await claimed(store, lease_s=EXPIRED_S)
    zombie, _ = await store.open_records(old)
    record, _ = await store.open_records(await taken_over(store))
    with pytest.raises(StaleClaimError):
        await store.commit_turn(zombie, make_turn(zombie, completion_ids=(66,)))
    turn = make_turn(record)
    record = await store.commit_turn(record, turn)
    assert await store.load_turns(record) == [turn]


async def test_a_result_under_an_old_fence_is_refused(store: Store) -> None:
    old = await claimed(store, lease_s=EXPIRED_S)
    zombie, _ = await store.open_records(old)
    record, _ = await store.open_records(await taken_over(store))
    with pytest.raises(StaleClaimError):
        await store.finish_record(finished(zombie))
    assert await store.get_record(record.id) == record


async def test_many_records_commit_and_finish_at_once_and_one_stale_writer_does_not_disturb_them(store: Store) -> None:
    old = await claimed(store, make_task(num_generations=24), lease_s=EXPIRED_S)
    (zombie, *_) = await store.open_records(old)
    _, *records = await store.open_records(await taken_over(store))

    async def roll_out(record: Record) -> Record:
        for _ in range(3):
            record = await store.commit_turn(record, make_turn(record, completion_ids=(record.generation,)))
        await store.finish_record(finished(record))
        return record

    late = asyncio.ensure_future(store.commit_turn(zombie, make_turn(zombie)))
    rolled_out = await asyncio.gather(*(roll_out(record) for record in records))
    with pytest.raises(StaleClaimError):
        await late
    for record in rolled_out:
        stored = await store.get_record(record.id)
        assert stored is not None
        assert stored.status is RecordStatus.FINISHED
        assert stored.turn_ids == record.turn_ids
        assert [turn.tokens.completion_ids for turn in await store.load_turns(stored)] == [(record.generation,)] * 3


async def test_finishing_twice_with_the_same_result_is_harmless_and_with_another_an_error(store: Store) -> None:
    record, _ = await store.open_records(await claimed(store))
    await store.finish_record(finished(record))
    first = await store.get_record(record.id)
    await store.finish_record(finished(record))
    assert await store.get_record(record.id) == first
    with pytest.raises(StoreError):
        await store.finish_record(finished(record, score=0.0))


async def test_a_failed_record_keeps_its_typed_reason_and_has_no_score(store: Store) -> None:
    record, _ = await store.open_records(await claimed(store))
    failed = replace(record, status=RecordStatus.FAILED, stop_reason=StopReason.TOOL_ERROR, error="server died")
    await store.finish_record(failed)
    stored = await store.get_record(record.id)
    assert stored is not None
    assert (stored.status, stored.stop_reason, stored.score) == (RecordStatus.FAILED, StopReason.TOOL_ERROR, None)
    assert stored.error == "server died"
    assert stored.finished_at is not None


async def test_a_record_that_is_not_final_cannot_be_finished(store: Store) -> None:
    record, _ = await store.open_records(await claimed(store))
    with pytest.raises(ValueError, match="not final"):
        await store.finish_record(record)


async def test_no_turn_is_added_to_a_finished_record(store: Store) -> None:
    record, _ = await store.open_records(await claimed(store))
    await store.finish_record(finished(record))
    with pytest.raises(StoreError):
        await store.commit_turn(record, make_turn(record))


# --- settlement ---------------------------------------------------------------------------------------------------


async def test_a_settled_group_reaches_the_planner_with_its_rows(store: Store) -> None:
    task = make_task()
    rows = await settled(store, task)
    (group,) = await store.settled_groups(split="train", limit=10)
    assert group.settlement == make_settlement(task) == await store.get_settlement(task.id)
    assert group.sequences == summarise_group(rows)
    assert group.mean_tool_calls == 0.0


async def test_the_planner_sees_how_many_tools_a_group_used(store: Store) -> None:
    taken = await claimed(store)
    first, _ = await store.open_records(taken)
    await store.commit_turn(first, make_turn(first, tool_results=("a", "b", "c")))
    await store.settle_task(taken, make_settlement(taken.task), [])
    (group,) = await store.settled_groups(split="train", limit=1)
    assert group.mean_tool_calls == 1.5


async def test_settling_again_under_the_same_claim_changes_nothing(store: Store) -> None:
    taken = await claimed(store)
    rows = [make_sequence(record) for record in await store.open_records(taken)]
    await store.settle_task(taken, make_settlement(taken.task), rows)
    before = await store.settled_groups(split="train", limit=10)
    await store.settle_task(taken, make_settlement(taken.task, rewards=(0.0, 0.0)), rows)
    assert await store.settled_groups(split="train", limit=10) == before


async def test_settling_with_a_lost_claim_is_refused_and_leaves_no_row(store: Store) -> None:
    old = await claimed(store, lease_s=EXPIRED_S)
    rows = [make_sequence(record) for record in await store.open_records(old)]
    new = await taken_over(store)
    with pytest.raises(StaleClaimError):
        await store.settle_task(old, make_settlement(old.task), rows)
    assert await store.list_sequences(split="train") == []
    await store.settle_task(new, make_settlement(new.task), [])


async def test_a_dropped_group_keeps_its_reason_and_its_missing_rewards(store: Store) -> None:
    task = make_task(num_generations=3)
    taken = await claimed(store, task)
    settlement = make_settlement(task, rewards=(1.0,), outcome=GroupOutcome.DROPPED, drop_reason="too few")
    await store.settle_task(taken, settlement, [])
    assert await store.get_settlement(task.id) == settlement


async def test_an_unsettled_task_has_no_settlement(store: Store) -> None:
    await store.insert_tasks([make_task()])
    assert await store.get_settlement(make_task().id) is None


async def test_settled_groups_come_oldest_first_and_up_to_the_limit(store: Store) -> None:
    for name in "abc":
        await settled(store, make_task(name))
        moment = await store.server_time()
        while await store.server_time() - moment < timedelta(milliseconds=2):
            pass
    groups = await store.settled_groups(split="train", limit=2)
    assert [group.settlement.task_id for group in groups] == ["train:0:a", "train:0:b"]


# --- rows ---------------------------------------------------------------------------------------------------------


def assert_equal_rows(left: DBRecordData, right: DBRecordData) -> None:
    for name in ("id", "task_id", "record_id", "split", "reward", "turn_ids"):
        assert getattr(left, name) == getattr(right, name)
    for name in ("token_ids", "loss_mask", "advantages", "behaviour_logprobs", "policy_versions"):
        a, b = getattr(left, name), getattr(right, name)
        if a is None or b is None:
            assert a is b
            continue
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()


async def test_rows_read_back_bit_equal_in_the_order_asked_for(store: Store) -> None:
    rows = [make_sequence(make_record(make_task(name)), completion_ids=range(k)) for k, name in enumerate("abcd")]
    rows[1] = replace(rows[1], behaviour_logprobs=None)
    rows[2].advantages[:] = np.float32("nan")
    assert await store.insert_sequences(rows) == 4
    wanted = [rows[2], rows[0], rows[3], rows[1], rows[0]]
    for row, loaded in zip(wanted, await store.load_sequences([row.id for row in wanted]), strict=True):
        assert_equal_rows(row, loaded)


async def test_a_row_far_above_the_document_limit_reads_back_equal(store: Store) -> None:
    length = 1_200_000
    noise = np.random.default_rng(1)
    row = replace(
        make_sequence(),
        token_ids=noise.integers(0, 150_000, length).astype(np.int32),
        loss_mask=noise.integers(0, 2, length).astype(np.bool_),
        advantages=np.zeros(length, dtype=np.float32),
        behaviour_logprobs=noise.standard_normal(length).astype(np.float32),
        policy_versions=np.zeros(length, dtype=np.int32),
    )
    await store.insert_sequences([row])
    (loaded,) = await store.load_sequences([row.id])
    assert_equal_rows(row, loaded)


async def test_a_missing_row_is_named(store: Store) -> None:
    await store.insert_sequences([make_sequence()])
    with pytest.raises(StoreError, match="no-such-row"):
        await store.load_sequences([make_sequence().id, "no-such-row"])


async def test_thousands_of_supervised_rows_are_inserted_once_and_listed_sorted(store: Store) -> None:
    base = replace(make_sequence(), split="sft", behaviour_logprobs=None)
    rows = [replace(base, id=f"sft/{k:05d}") for k in range(3000)]
    assert await store.insert_sequences(rows[:2500]) == 2500
    assert await store.insert_sequences(rows) == 500
    assert await store.list_sequences(split="sft") == [row.id for row in rows]
    assert await store.list_sequences(split="train") == []


# --- ledger -------------------------------------------------------------------------------------------------------


async def test_committing_a_step_consumes_its_groups_and_planning_does_not(store: Store) -> None:
    for name in "ab":
        await settled(store, make_task(name))
    plan = await store.plan_step(replace(planned(1, task_ids=("train:0:a",)), sequence_ids=("train:0:a/g0/s0",)))
    assert plan.status is StepStatus.PLANNED
    assert plan.attempts == 1
    assert plan.planned_at is not None
    assert len(await store.settled_groups(split="train", limit=10)) == 2
    await store.commit_step(plan)
    await store.commit_step(plan)
    (left,) = await store.settled_groups(split="train", limit=10)
    assert left.settlement.task_id == "train:0:b"


async def test_planning_a_step_again_returns_the_first_plan_and_counts_the_attempt(store: Store) -> None:
    for name in "ab":
        await settled(store, make_task(name))
    first = await store.plan_step(planned(1, task_ids=("train:0:a",)))
    again = await store.plan_step(planned(1, task_ids=("train:0:b",)))
    assert again == replace(first, attempts=2)
    assert await store.get_step(1) == again


async def test_groups_dropped_by_a_plan_are_consumed_with_its_commit(store: Store) -> None:
    for name in "abc":
        await settled(store, make_task(name))
    step = replace(planned(1, task_ids=("train:0:a", "train:0:b")), dropped={"train:0:b": "stale"})
    assert (await store.plan_step(step)).dropped == {"train:0:b": "stale"}
    await store.commit_step(step)
    assert (await store.count_tasks(split="train"))[TaskStatus.SETTLED] == 1


async def test_an_epoch_enqueues_the_first_ones_tasks_again_once(store: Store) -> None:
    assert await store.enqueue_epoch(split="train", epoch=1) is None
    await store.insert_tasks([make_task("a"), make_task("b")])
    assert await store.enqueue_epoch(split="train", epoch=1) == 2
    assert await store.enqueue_epoch(split="train", epoch=1) == 0
    claims = await store.claim_tasks(split="train", owner="w", lease_s=60, limit=10)
    assert {claim.task.id for claim in claims} == {f"train:{epoch}:{name}" for epoch in (0, 1) for name in "ab"}
    assert {claim.task.query for claim in claims} == {make_task("a").query, make_task("b").query}


async def test_samplers_that_enqueue_an_epoch_at_the_same_time_enqueue_every_task_once(store: Store) -> None:
    await store.insert_tasks([make_task(str(number)) for number in range(20)])
    added = await asyncio.gather(*(store.enqueue_epoch(split="train", epoch=1) for _ in range(6)))
    assert sum(count or 0 for count in added) == 20
    claims = await store.claim_tasks(split="train", owner="w", lease_s=60, limit=100)
    assert sorted(claim.task.id for claim in claims) == sorted(
        f"train:{epoch}:{number}" for epoch in (0, 1) for number in range(20)
    )


async def test_an_epoch_whose_enqueueing_was_cut_off_is_completed_by_the_next_who_asks(store: Store) -> None:
    await store.insert_tasks([make_task(name) for name in "abc"])
    await store.insert_tasks([make_task("b", epoch=1)])
    assert await store.enqueue_epoch(split="train", epoch=1) == 2
    assert await store.enqueue_epoch(split="train", epoch=1) == 0
    claims = await store.claim_tasks(split="train", owner="w", lease_s=60, limit=10)
    assert sorted(claim.task.id for claim in claims if claim.task.epoch == 1) == [f"train:1:{name}" for name in "abc"]


async def test_committing_a_step_completes_its_entry(store: Store) -> None:
    plan = await store.plan_step(planned(1, task_ids=("t",), sequence_ids=("s", "r")))
    alarm = Alarm(name="zero_signal", message="nothing to learn", steps=(1,), subjects=("train:0:a.b/g0",))
    metrics = {"train.loss": 0.5, "kl/k3": float("inf")}
    await store.commit_step(replace(plan, metrics=metrics, alarms=(alarm,), checkpoint="step-1"))
    step = await store.get_step(1)
    assert step is not None
    assert step.status is StepStatus.COMMITTED
    assert step.metrics == {"train.loss": 0.5, "kl/k3": float("inf")}
    assert step.alarms == (alarm,)
    assert (step.checkpoint, step.sequence_ids) == ("step-1", ("s", "r"))
    assert step.committed_at is not None


async def test_a_commit_consumes_what_was_planned_whoever_commits(store: Store) -> None:
    for name in "ab":
        await settled(store, make_task(name))
    await store.plan_step(planned(1, task_ids=("train:0:a",)))
    for _ in range(2):
        await store.commit_step(planned(1, task_ids=("train:0:b",)))
    (left,) = await store.settled_groups(split="train", limit=10)
    assert left.settlement.task_id == "train:0:b"


async def test_a_step_without_a_plan_cannot_be_committed(store: Store) -> None:
    with pytest.raises(StoreError, match="no plan"):
        await store.commit_step(planned(3, task_ids=()))


async def test_the_ledger_lists_steps_in_order_and_by_task(store: Store) -> None:
    for step, task_ids in ((10, ("a", "b")), (2, ("b",)), (1, ("c",))):
        await store.plan_step(planned(step, task_ids=task_ids))
    assert [step.step for step in await store.list_steps()] == [1, 2, 10]
    assert [step.step for step in await store.steps_of_task("b")] == [2, 10]
    assert await store.get_step(5) is None


async def test_dropping_groups_takes_them_from_the_planner(store: Store) -> None:
    for name in "abc":
        await settled(store, make_task(name))
    await store.drop_groups({"train:0:a": "zero advantage", "train:0:c": "stale"})
    (left,) = await store.settled_groups(split="train", limit=10)
    assert left.settlement.task_id == "train:0:b"


async def test_the_newest_policy_is_the_highest_version_ever_published(store: Store) -> None:
    assert await store.latest_policy() is None
    for version in (0, 1, 10, 9):
        await store.publish_policy(PolicyVersion(version=version, path=f"policy-{version}"))
    newest = await store.latest_policy()
    assert newest is not None
    assert (newest.version, newest.path) == (10, "policy-10")
    assert newest.created_at is not None


# --- fleet and run ------------------------------------------------------------------------------------------------


async def test_a_service_is_refreshed_under_its_id_with_a_server_heartbeat(store: Store) -> None:
    service = InferenceService(
        id="s", base_url="http://127.0.0.1:1", status=ServiceStatus.UP, policy_version=1, engine="sglang", num_running=3
    )
    before = await store.server_time()
    await store.put_service(replace(service, status=ServiceStatus.DOWN))
    await store.put_service(service)
    (listed,) = await store.list_services()
    assert replace(listed, heartbeat_at=None) == service
    assert listed.heartbeat_at is not None
    assert abs(listed.heartbeat_at - before) < timedelta(seconds=10)


async def test_what_a_service_answered_to_its_canaries_reads_back_equal(store: Store) -> None:
    answer = CanaryAnswer(policy_version=3, logprobs=(-1.1, -0.3), started_s=1e9 + 0.125, finished_s=1e9 + 0.25)
    service = InferenceService(
        id="s", base_url="http://127.0.0.1:1", status=ServiceStatus.QUARANTINED, policy_version=3, canary=answer,
        last_good_s=1e9,
    )  # fmt: skip
    await store.put_service(service)
    (listed,) = await store.list_services()
    assert replace(listed, heartbeat_at=None) == service
    reference = CanaryReference(prompts=((1, 2), (3, 4)), logprobs=(-1.5, -2.25))
    await store.publish_policy(PolicyVersion(version=3, path="v3", canary=reference))
    newest = await store.latest_policy()
    assert newest is not None
    assert newest.canary == reference


async def test_a_quarantine_is_raised_once_stamped_by_the_server_and_lifted(store: Store) -> None:
    quarantine = EngineQuarantine(id="s@1000", service_id="s", policy_version=2, deviation=3.5, since_s=1.0)
    before = await store.server_time()
    await store.raise_engine_quarantine(quarantine)
    (raised,) = await store.list_engine_quarantines()
    assert replace(raised, raised_at=None) == quarantine
    assert raised.raised_at is not None
    assert raised.raised_at >= before - timedelta(seconds=1)
    await store.lift_engine_quarantine("s@1000", until_s=9.5)
    await store.raise_engine_quarantine(quarantine)  # late, and known
    assert await store.list_engine_quarantines() == [replace(raised, until_s=9.5)]


async def test_workers_are_listed_by_id(store: Store) -> None:
    before = await store.server_time()
    for name in ("b", "a"):
        await store.put_worker(Worker(id=name, kind="sampler", host="h", pid=7, num_running=2, phase="rolling"))
    workers = await store.list_workers()
    assert [(worker.id, worker.pid, worker.phase) for worker in workers] == [("a", 7, "rolling"), ("b", 7, "rolling")]
    assert all(worker.heartbeat_at and worker.heartbeat_at >= before.replace(microsecond=0) for worker in workers)


async def test_the_run_document_is_created_and_updated_by_key(store: Store) -> None:
    assert await store.get_run() is None
    await store.put_run({"config": {"seed": 1, "optim.args": "x"}, "state": "running"})
    await store.put_run({"state": "finished"})
    assert await store.get_run() == {"config": {"seed": 1, "optim.args": "x"}, "state": "finished"}


async def test_records_are_listed_newest_first_by_split_and_task(store: Store) -> None:
    for name, split in (("a", "train"), ("b", "train"), ("c", "eval")):
        await store.insert_tasks([make_task(name, split=split)])
        (taken,) = await store.claim_tasks(split=split, owner="w", lease_s=LONG_S, limit=1)
        await store.open_records(taken)
    everything = await store.list_records()
    assert [record.started_at for record in everything] == sorted(
        (record.started_at for record in everything if record.started_at), reverse=True
    )
    assert {record.task_id for record in everything} == {"train:0:a", "train:0:b", "eval:0:c"}
    assert len(everything) == 6
    assert len(await store.list_records(split="train")) == 4
    assert len(await store.list_records(split="train", limit=3)) == 3
    assert {record.task_id for record in await store.list_records(task_id="train:0:b")} == {"train:0:b"}
    assert await store.list_records(task_id="nothing") == []
    assert await store.get_record("nothing") is None
    assert await store.get_task("nothing") is None


async def test_a_look_counts_tasks_and_returns_expired_claims_at_once(store: Store) -> None:
    await store.insert_tasks([make_task(f"q{number}") for number in range(4)])
    (expired,) = await store.claim_tasks(split="train", owner="dead", lease_s=0.0, limit=1)
    (held,) = await store.claim_tasks(split="train", owner="alive", lease_s=60, limit=1)
    look = await store.look_over_tasks(split="train")
    assert look.reaped == (expired.task.id,)
    assert (look.counts[TaskStatus.PENDING], look.counts[TaskStatus.RUNNING]) == (3, 1)
    assert (await store.look_over_tasks(split="train")).reaped == ()
    assert await store.renew_claims([held], lease_s=60) == []
