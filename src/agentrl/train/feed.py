"""The trainer's only door to the database: one thread that owns an event loop and an asynchronous TrainStore.

    trainer thread                          store thread
    feed.call(lambda s: s.get_step(7))  ->  loop: await store.get_step(7)
         blocks                         <-  result or exception
    feed.prefetch(ids of step 8)        ->  loop: await store.load_sequences(...)     (step 7 computes meanwhile)

So the loop stays plain code, the connection lives as long as the process, and reconnecting is the store's business.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, TypeVar

from agentrl.errors import StoreError
from agentrl.protocols import TrainStore
from agentrl.types import DBRecordData

Result = TypeVar("Result")


class StoreFeed:
    """Blocking calls for a caller without an event loop. A context manager; not re-entrant.

    `timeout_s` bounds opening and closing. Calls are bounded by the store alone: it knows whether the database is slow,
    which is an error after a while, or away, which is waited out.
    """

    def __init__(self, open_store: Callable[[], Awaitable[TrainStore]], *, timeout_s: float) -> None:
        self._open_store = open_store
        self._timeout_s = timeout_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="store-feed", daemon=True)
        self._store: TrainStore | None = None
        self._rows: dict[str, DBRecordData] = {}
        self._coming: concurrent.futures.Future[list[DBRecordData]] | None = None

    def __enter__(self) -> StoreFeed:
        """Start the thread and connect."""
        self._thread.start()
        try:
            self._store = self._wait_bounded(self._submit(self._open()), name="opening the store")
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Disconnect and end the thread."""
        try:
            if self._coming is not None:
                self._coming.cancel()
            self._wait_bounded(self._submit(self._connected().close()), name="closing the store")
        finally:
            self._stop()

    def call(self, operation: Callable[[TrainStore], Coroutine[Any, Any, Result]]) -> Result:
        """Run one store operation and wait for it. Raises what it raises."""
        return self._submit(operation(self._connected())).result()

    def prefetch(self, ids: Sequence[str]) -> None:
        """Start loading rows that a later `load` will ask for. Errors surface there."""
        wanted = list(ids)
        self._coming = self._submit(self._connected().load_sequences(wanted)) if wanted else None

    def load(self, ids: Sequence[str]) -> list[DBRecordData]:
        """Rows in the order of `ids`, from what was prefetched or loaded last where possible."""
        if self._coming is not None and any(row_id not in self._rows for row_id in ids):
            coming, self._coming = self._coming, None
            self._rows.update((row.id, row) for row in coming.result())
        missing = [row_id for row_id in ids if row_id not in self._rows]
        if missing:
            self._rows.update((row.id, row) for row in self.call(lambda store: store.load_sequences(missing)))
        return [self._rows[row_id] for row_id in ids]

    def forget_rows(self) -> None:
        """Release the rows of a finished step. What is being prefetched stays."""
        self._rows.clear()

    def _connected(self) -> TrainStore:
        if self._store is None:
            raise StoreError("the store feed is not open; use it as a context manager")
        return self._store

    async def _open(self) -> TrainStore:
        return await self._open_store()

    def _submit(self, coroutine: Coroutine[Any, Any, Result]) -> concurrent.futures.Future[Result]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _wait_bounded(self, future: concurrent.futures.Future[Result], *, name: str) -> Result:
        done, _ = concurrent.futures.wait([future], timeout=self._timeout_s)
        if not done:
            future.cancel()
            raise StoreError(f"{name} did not finish within {self._timeout_s:g} s; is the database reachable?")
        return future.result()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=self._timeout_s)
        if not self._thread.is_alive():
            self._loop.close()
