"""Concurrent writes share a batch; failures reach exactly the callers they belong to."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from agentrl.errors import StoreError
from agentrl.store.group_commit import MAX_BATCH, GroupCommit


class Recorder:
    """A writer that doubles numbers, refuses batches with a 13, and can be held up."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def write(self, batch: Sequence[int]) -> list[int]:
        self.batches.append(list(batch))
        await self.gate.wait()
        if 13 in batch:
            raise StoreError("13 in the batch")
        if 99 in batch:
            raise ZeroDivisionError
        return [2 * item for item in batch]


async def test_what_arrives_during_a_batch_goes_out_together_in_the_next() -> None:
    recorder = Recorder()
    recorder.gate.clear()
    commits = GroupCommit(recorder.write)
    first = asyncio.ensure_future(commits.submit(1))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    rest = asyncio.gather(*(commits.submit(item) for item in range(2, 6)))
    await asyncio.sleep(0)
    recorder.gate.set()
    assert [await first, *await rest] == [2, 4, 6, 8, 10]
    assert recorder.batches == [[1], [2, 3, 4, 5]]


async def test_a_batch_has_a_bounded_size() -> None:
    recorder = Recorder()
    commits = GroupCommit(recorder.write)
    await asyncio.gather(*(commits.submit(100 + item) for item in range(MAX_BATCH + 5)))
    assert [len(batch) for batch in recorder.batches] == [MAX_BATCH, 5]


async def test_a_failed_batch_fails_its_callers_and_not_the_next_ones() -> None:
    commits = GroupCommit(Recorder().write)
    failed = await asyncio.gather(commits.submit(13), commits.submit(1), return_exceptions=True)
    assert [type(outcome) for outcome in failed] == [StoreError, StoreError]
    assert await commits.submit(4) == 8


async def test_a_cancelled_caller_does_not_disturb_its_batch() -> None:
    recorder = Recorder()
    recorder.gate.clear()
    commits = GroupCommit(recorder.write)
    cancelled, kept = (asyncio.ensure_future(commits.submit(item)) for item in (1, 2))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    cancelled.cancel()
    recorder.gate.set()
    assert await kept == 4
    assert recorder.batches == [[1, 2]]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_an_unexpected_error_leaves_nobody_waiting() -> None:
    recorder = Recorder()
    recorder.gate.clear()
    commits = GroupCommit(recorder.write)
    first = asyncio.ensure_future(commits.submit(99))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    second = asyncio.ensure_future(commits.submit(1))
    await asyncio.sleep(0)
    recorder.gate.set()
    async with asyncio.timeout(5):
        outcomes = await asyncio.gather(first, second, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [ZeroDivisionError, ZeroDivisionError]


async def test_closing_waits_for_what_was_submitted() -> None:
    recorder = Recorder()
    commits = GroupCommit(recorder.write)
    submitted = asyncio.ensure_future(commits.submit(1))
    await asyncio.sleep(0)
    await commits.close()
    assert recorder.batches == [[1]]
    assert await submitted == 2
