"""A Record starts over under a new attempt, failed or taken over: on every store, also if a worker dies in between."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentrl.errors import StaleClaimError, StoreError
from agentrl.protocols import Store
from agentrl.types import Record, RecordStatus, StopReason, TaskClaim
from factories import make_task, make_turn


async def claim(store: Store) -> TaskClaim:
    (taken,) = await store.claim_tasks(split="train", owner="worker", lease_s=3600.0, limit=1)
    return taken


def failed(record: Record) -> Record:
    return replace(record, status=RecordStatus.FAILED, stop_reason=StopReason.ENGINE_ERROR, error="gone")


async def failed_after_a_turn(store: Store) -> tuple[TaskClaim, Record]:
    await store.insert_tasks([make_task(num_generations=1)])
    taken = await claim(store)
    (record,) = await store.open_records(taken)
    record = await store.commit_turn(record, make_turn(record, tool_results=["2"]))
    await store.finish_record(failed(record))
    return taken, failed(record)


async def test_a_reopened_record_starts_over_and_its_failed_attempt_stays_a_fact(store: Store) -> None:
    _, old = await failed_after_a_turn(store)
    record = await store.reopen_record(old)
    assert (record.status, record.attempt, record.fence, record.turn_ids) == (RecordStatus.RUNNING, 2, old.fence, ())
    assert (record.stop_reason, record.error, record.num_tool_calls, record.num_completion_tokens) == (None, None, 0, 0)
    assert await store.get_record(old.id) == record
    (kept,) = await store.list_quarantined()
    assert kept.key == f"attempt 1 of {old.id}"
    assert "engine_error" in kept.reason
    assert set(old.turn_ids) <= set(kept.ids)
    (turn,) = await store.load_turns(old)
    assert turn.model.id == old.turn_ids[0]


async def test_the_turns_of_the_next_attempt_are_new_calls(store: Store) -> None:
    _, old = await failed_after_a_turn(store)
    record = await store.reopen_record(old)
    turn = make_turn(record, completion_ids=(9, 9, 9))
    assert turn.model.id not in old.turn_ids
    record = await store.commit_turn(record, turn)
    await store.finish_record(replace(record, status=RecordStatus.FINISHED, stop_reason=StopReason.ANSWER, score=1.0))
    stored = await store.get_record(record.id)
    assert stored is not None
    assert (stored.attempt, stored.score, stored.turn_ids, stored.num_completion_tokens) == (
        2,
        1.0,
        (turn.model.id,),
        3,
    )


async def test_reopening_again_after_a_lost_reply_finds_its_own_work(store: Store) -> None:
    _, old = await failed_after_a_turn(store)
    first = await store.reopen_record(old)
    assert await store.reopen_record(old) == first
    assert len(await store.list_quarantined()) == 1


async def test_late_writes_of_an_earlier_attempt_do_not_reach_the_next_one(store: Store) -> None:
    _, old = await failed_after_a_turn(store)
    record = await store.reopen_record(old)
    with pytest.raises(StoreError):
        await store.finish_record(old)
    running = replace(old, status=RecordStatus.RUNNING, turn_ids=(), turn_prompt_tokens=())
    with pytest.raises(StoreError):
        await store.commit_turn(running, make_turn(running, completion_ids=(8,), index=0, tool_results=["2"]))
    assert await store.get_record(old.id) == record


@pytest.mark.parametrize("status", [RecordStatus.RUNNING, RecordStatus.FINISHED])
async def test_only_a_failed_record_is_sampled_again(store: Store, status: RecordStatus) -> None:
    await store.insert_tasks([make_task(num_generations=1)])
    (record,) = await store.open_records(await claim(store))
    if status is RecordStatus.FINISHED:
        record = replace(record, status=status, stop_reason=StopReason.ANSWER, score=0.0)
        await store.finish_record(record)
    with pytest.raises(StoreError, match="only a failed attempt is sampled again"):
        await store.reopen_record(record)


async def test_the_next_owner_may_reopen_what_its_predecessor_left_failed_and_the_predecessor_may_not(
    store: Store,
) -> None:
    first, old = await failed_after_a_turn(store)
    await store.release_claim(first)
    second = await claim(store)
    (taken_over,) = await store.open_records(second)
    assert (taken_over.status, taken_over.fence) == (RecordStatus.FAILED, second.fence)
    with pytest.raises(StaleClaimError):
        await store.reopen_record(old)
    record = await store.reopen_record(taken_over)
    assert (record.attempt, record.fence) == (2, second.fence)


async def test_a_worker_that_dies_after_reopening_leaves_the_next_attempt_to_its_successor(store: Store) -> None:
    first, old = await failed_after_a_turn(store)
    await store.reopen_record(old)
    await store.release_claim(first)
    second = await claim(store)
    (taken_over,) = await store.open_records(second)
    assert (taken_over.status, taken_over.attempt, taken_over.fence) == (RecordStatus.RUNNING, 2, second.fence)


async def taken_over_after_a_turn(store: Store) -> tuple[Record, TaskClaim, Record]:
    """The header its dead owner knew, the successor's claim, the header under that."""
    await store.insert_tasks([make_task(num_generations=1)])
    first = await claim(store)
    (record,) = await store.open_records(first)
    record = await store.commit_turn(record, make_turn(record, tool_results=["2"]))
    await store.release_claim(first)
    second = await claim(store)
    (taken_over,) = await store.open_records(second)
    return record, second, taken_over


async def test_a_restarted_record_has_a_new_fence_and_attempt_and_its_old_turns_are_kept_with_the_reason(
    store: Store,
) -> None:
    old, second, taken_over = await taken_over_after_a_turn(store)
    record = await store.restart_record(taken_over, reason="the shell is gone")
    assert (record.status, record.attempt, record.fence, record.turn_ids) == (
        RecordStatus.RUNNING,
        2,
        second.fence,
        (),
    )
    assert record.fence > old.fence
    assert await store.get_record(old.id) == record
    (kept,) = await store.list_quarantined()
    assert (kept.key, kept.reason, kept.ids) == (f"attempt 1 of {old.id}", "the shell is gone", old.turn_ids)
    (turn,) = await store.load_turns(old)
    assert turn.model.id == old.turn_ids[0]


async def test_restarting_again_after_a_lost_reply_finds_its_own_work(store: Store) -> None:
    _, _, taken_over = await taken_over_after_a_turn(store)
    first = await store.restart_record(taken_over, reason="gone")
    assert await store.restart_record(taken_over, reason="gone") == first
    assert len(await store.list_quarantined()) == 1


async def test_neither_the_dead_owner_nor_the_old_attempt_reaches_a_restarted_record(store: Store) -> None:
    old, _, taken_over = await taken_over_after_a_turn(store)
    record = await store.restart_record(taken_over, reason="gone")
    with pytest.raises(StaleClaimError):
        await store.commit_turn(old, make_turn(old))
    with pytest.raises(StaleClaimError):
        await store.restart_record(old, reason="late")
    with pytest.raises(StoreError):
        await store.commit_turn(taken_over, make_turn(taken_over))
    assert await store.get_record(old.id) == record


async def test_only_an_unfinished_record_is_restarted(store: Store) -> None:
    _, old = await failed_after_a_turn(store)
    with pytest.raises(StoreError, match="only a running attempt is restarted"):
        await store.restart_record(old, reason="gone")
