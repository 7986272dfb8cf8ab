import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from agentrl.errors import StoreError
from agentrl.protocols import TrainStore
from agentrl.store import MemoryStore
from agentrl.train.feed import StoreFeed
from tiny_model import random_row


async def fresh_store() -> TrainStore:
    return MemoryStore()


def test_operations_run_on_one_other_thread_and_errors_come_back() -> None:
    async def thread_name(store: TrainStore) -> str:
        return threading.current_thread().name

    async def fail(store: TrainStore) -> None:
        raise StoreError("row r9 is not there")

    with StoreFeed(fresh_store, timeout_s=5.0) as feed:
        assert feed.call(thread_name) == "store-feed"
        with pytest.raises(StoreError, match="row r9"):
            feed.call(fail)


def test_an_opening_that_hangs_is_given_up_and_ends_the_thread() -> None:
    async def hang() -> TrainStore:
        await asyncio.Event().wait()
        raise AssertionError("never")

    with pytest.raises(StoreError, match=r"did not finish within 0\.1 s"), StoreFeed(hang, timeout_s=0.1):
        pass
    assert "store-feed" not in {thread.name for thread in threading.enumerate()}


def test_a_call_may_wait_longer_than_opening_may_take() -> None:
    asked, answer = threading.Event(), threading.Event()

    async def wait_for_the_database(store: TrainStore) -> str:
        asked.set()
        await asyncio.to_thread(answer.wait, 10.0)
        return "back"

    with StoreFeed(fresh_store, timeout_s=0.05) as feed, ThreadPoolExecutor() as caller:
        call = caller.submit(feed.call, wait_for_the_database)
        assert asked.wait(timeout=5.0)
        with pytest.raises(TimeoutError):
            call.result(timeout=0.2)
        answer.set()
        assert call.result(timeout=5.0) == "back"


def test_a_store_that_cannot_be_opened_ends_the_thread() -> None:
    async def broken() -> TrainStore:
        raise StoreError("no database")

    feed = StoreFeed(broken, timeout_s=5.0)

    with pytest.raises(StoreError, match="no database"), feed:
        pass
    assert "store-feed" not in {thread.name for thread in threading.enumerate()}


def test_rows_are_loaded_once_in_order_and_prefetched_ones_are_used() -> None:
    class CountingStore(MemoryStore):
        loads: list[list[str]] = []  # noqa: RUF012 - one store per test

        async def load_sequences(self, ids):
            self.loads.append(list(ids))
            return await super().load_sequences(ids)

    store = CountingStore()

    async def open_store() -> TrainStore:
        return store

    rows = [random_row(f"r{k}", rng=np.random.default_rng(k)) for k in range(4)]
    with StoreFeed(open_store, timeout_s=5.0) as feed:
        feed.call(lambda opened: opened.insert_sequences(rows))
        assert [row.id for row in feed.load(["r1", "r0"])] == ["r1", "r0"]
        feed.prefetch(["r2", "r3"])
        assert [row.id for row in feed.load(["r0"])] == ["r0"]
        feed.forget_rows()
        assert [row.id for row in feed.load(["r3", "r2"])] == ["r3", "r2"]
        assert [row.id for row in feed.load(["r1"])] == ["r1"]

    assert store.loads == [["r1", "r0"], ["r2", "r3"], ["r1"]]
