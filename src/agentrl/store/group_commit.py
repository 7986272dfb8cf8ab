"""Group commit: writes that arrive while one batch is on its way go out together in the next.

A durable write waits for the journal (about 6 ms), whatever its size. With a hundred rollouts in one process the wait
is shared instead of repeated, and a lone write is not delayed: it forms a batch of one at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Generic, TypeVar

from agentrl.errors import StoreError

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")

MAX_BATCH: Final = 128


class GroupCommit(Generic[Item, Outcome]):
    """Collects items and writes them batch by batch, one batch in flight. Belongs to one event loop."""

    def __init__(self, write: Callable[[Sequence[Item]], Awaitable[Sequence[Outcome]]]) -> None:
        self._write = write
        self._waiting: list[tuple[Item, asyncio.Future[Outcome]]] = []
        self._writer: asyncio.Task[None] | None = None

    async def submit(self, item: Item) -> Outcome:
        """Write one item; returns its outcome once its batch is durable. Raises what the batch raised.

        A caller that is cancelled stops waiting; its item is still written.
        """
        done: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, done))
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_all(), name="store-group-commit")
        return await done

    async def close(self) -> None:
        """Wait until everything submitted is written."""
        if self._writer is not None:
            await self._writer

    async def _write_all(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
                await self._write_batch(batch)
        finally:
            self._writer = None

    async def _write_batch(self, batch: Sequence[tuple[Item, asyncio.Future[Outcome]]]) -> None:
        try:
            outcomes = await self._write([item for item, _ in batch])
        except StoreError as error:
            _fail(batch, error)
            return
        except BaseException as error:  # a bug or the end of the loop: nobody may be left waiting
            _fail([*batch, *self._waiting], error)
            self._waiting = []
            raise
        for (_, done), outcome in zip(batch, outcomes, strict=True):
            if not done.done():
                done.set_result(outcome)


def _fail(batch: Sequence[tuple[Item, asyncio.Future[Outcome]]], error: BaseException) -> None:
    for _, done in batch:
        if done.done():
            continue
        if isinstance(error, asyncio.CancelledError):
            done.cancel()
        else:
            done.set_exception(error)
