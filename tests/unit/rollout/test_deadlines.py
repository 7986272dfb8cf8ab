from __future__ import annotations

import asyncio
import contextlib

import pytest

from agentrl.rollout.deadlines import deadline, stopped_clock, time_left_s

LIMIT_S = 0.05


async def wait_for_the_store() -> None:
    """Longer than any deadline here."""
    with stopped_clock():
        await asyncio.sleep(4 * LIMIT_S)


async def test_work_that_takes_too_long_is_cut_off() -> None:
    with pytest.raises(TimeoutError):
        async with deadline(LIMIT_S):
            await asyncio.Event().wait()


async def test_waiting_for_the_store_does_not_count_for_any_surrounding_deadline() -> None:
    async with deadline(LIMIT_S), deadline(LIMIT_S):
        await wait_for_the_store()


async def test_after_the_wait_the_rest_of_the_time_runs_on() -> None:
    async def work() -> None:
        async with deadline(LIMIT_S):
            await wait_for_the_store()
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await work()


async def test_waits_in_child_tasks_hold_the_deadline_until_the_last_one_ends() -> None:
    async with deadline(LIMIT_S), asyncio.TaskGroup() as group:
        group.create_task(wait_for_the_store())
        with stopped_clock():
            await asyncio.sleep(0)
        group.create_task(wait_for_the_store())


async def test_a_wait_that_something_else_cuts_off_leaves_the_deadline_running() -> None:
    async def work() -> None:
        async with deadline(2 * LIMIT_S):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LIMIT_S):
                    await wait_for_the_store()
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await work()


async def test_cleaning_up_after_a_deadline_may_wait_for_the_store() -> None:
    is_cleaned_up = False

    async def work() -> None:
        nonlocal is_cleaned_up
        async with deadline(LIMIT_S):
            try:
                await asyncio.Event().wait()
            finally:
                await wait_for_the_store()
                is_cleaned_up = True

    with pytest.raises(TimeoutError):
        await work()
    assert is_cleaned_up


async def test_the_time_left_is_that_of_the_tightest_deadline_and_does_not_run_while_the_store_is_waited_for():
    assert time_left_s() == float("inf")
    async with deadline(100), deadline(10):
        left_s = time_left_s()
        assert 9 < left_s <= 10
        with stopped_clock():
            held_s = time_left_s()
            await asyncio.sleep(0.05)
            assert time_left_s() == held_s
        async with asyncio.timeout(5), deadline(1000):
            assert time_left_s() <= 10
    assert time_left_s() == float("inf")
