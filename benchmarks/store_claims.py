"""What a claim costs however long the queue is, and that no Task is ever handed out twice.

    python benchmarks/store_claims.py [--claims 200] [--claimers 32]

`claim`     agentrl's claim of one Task: random slot range through an index, then compare-and-set
`findAndModify`   the usual claim: sorted find_one_and_update over the pending Tasks, on the same queue

Server CPU is what counts: the wall clock includes whatever else the machine does. Claims are given back between rounds,
so that the queue keeps its length.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
from pymongo import ASCENDING

from agentrl.store.connection import Database
from agentrl.store.documents import task_to_document
from agentrl.store.embedded import start_embedded
from agentrl.store.indexes import TASK
from agentrl.store.mongo import MongoStore
from agentrl.types import Task, TaskClaim, TaskStatus

ROUND = 50
LEASE_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """How many Tasks there are in a database of its own."""

    pending: int
    consumed: int = 0

    @property
    def name(self) -> str:
        return f"{self.pending:,} pending" + (f", {self.consumed:,} finished" if self.consumed else "")


def make_task(number: int) -> Task:
    return Task(
        id=f"train:0:{number}",
        item_id=str(number),
        split="train",
        epoch=0,
        query="What is 1 + 1?",
        answer="2",
        num_generations=8,
    )


async def fill(database: Database, store: MongoStore, queue: Queue) -> None:
    """Pending Tasks as they are inserted, finished ones as the trainer leaves them."""
    await store.insert_tasks([make_task(number) for number in range(queue.pending)])
    finished = [
        {**task_to_document(make_task(queue.pending + number), slot=number), "status": TaskStatus.CONSUMED.value}
        for number in range(queue.consumed)
    ]
    for start in range(0, len(finished), 1000):
        await database.durable(TASK).insert_many(finished[start : start + 1000])


class Stopwatch:
    """Adds up wall clock and server CPU of what runs inside it."""

    def __init__(self, server_pid: int) -> None:
        self._server = psutil.Process(server_pid)
        self.wall_s = self.server_s = 0.0

    async def time(self, work: Callable[[], Awaitable[list[TaskClaim]]]) -> list[TaskClaim]:
        before, started = self._cpu(), time.perf_counter()
        result = await work()
        self.wall_s += time.perf_counter() - started
        self.server_s += self._cpu() - before
        return result

    def _cpu(self) -> float:
        times = self._server.cpu_times()
        return times.user + times.system


async def measure_claims(store: MongoStore, *, server_pid: int, num_claims: int) -> Stopwatch:
    """Claim one at a time; give back after every round."""

    async def one_round() -> list[TaskClaim]:
        return [
            claim
            for _ in range(ROUND)
            for claim in await store.claim_tasks(split="train", owner="benchmark", lease_s=LEASE_S, limit=1)
        ]

    for claim in await one_round():  # the probe learns how dense the queue is
        await store.release_claim(claim)
    watch = Stopwatch(server_pid)
    for _ in range(num_claims // ROUND):
        claims = await watch.time(one_round)
        assert len(claims) == ROUND
        for claim in claims:
            await store.release_claim(claim)
    return watch


async def measure_usual(database: Database, *, server_pid: int, num_claims: int) -> Stopwatch:
    """The same with one sorted find_one_and_update per claim."""
    tasks = database.durable(TASK)
    query = {"split": "train", "status": TaskStatus.PENDING.value}
    pending, running = ({"$set": {"status": status.value}} for status in (TaskStatus.PENDING, TaskStatus.RUNNING))

    async def claims() -> list[TaskClaim]:
        for _ in range(num_claims):
            assert await tasks.find_one_and_update(query, running, sort=[("slot", ASCENDING)]) is not None
        return []

    watch = Stopwatch(server_pid)
    await watch.time(claims)
    await tasks.update_many({"split": "train", "status": TaskStatus.RUNNING.value}, pending)
    return watch


async def measure_duplicates(uri: str, *, server_pid: int, num_tasks: int, num_claimers: int) -> None:
    """Many claimers, each with its own connection pool and probe, empty one queue."""
    databases = [Database(uri, name="drained", timeout_s=60) for _ in range(num_claimers)]
    stores = [MongoStore(database, rng=random.Random(k)) for k, database in enumerate(databases)]
    await stores[0].prepare()
    await stores[0].insert_tasks([make_task(number) for number in range(num_tasks)])

    async def drain(store: MongoStore, owner: str) -> list[TaskClaim]:
        claims: list[TaskClaim] = []
        while taken := await store.claim_tasks(split="train", owner=owner, lease_s=LEASE_S, limit=1):
            claims += taken
        return claims

    async def drain_all() -> list[TaskClaim]:
        drained = await asyncio.gather(*(drain(store, f"claimer-{k}") for k, store in enumerate(stores)))
        return [claim for claims in drained for claim in claims]

    watch = Stopwatch(server_pid)
    claims = await watch.time(drain_all)
    duplicates = len(claims) - len({claim.task.id for claim in claims})
    again = sum(claim.fence != 1 for claim in claims)
    print(
        f"{num_claimers} claimers, {num_tasks:,} tasks: {len(claims):,} claims, {duplicates} duplicates, "
        f"{again} claimed again, {len(claims) / watch.wall_s:.0f} claims/s, "
        f"server CPU {1e3 * watch.server_s / len(claims):.2f} ms per claim"
    )
    for store in stores:
        await store.close()


async def run(uri: str, *, server_pid: int, num_claims: int, num_claimers: int) -> None:
    print(f"{'server CPU and wall, ms':<28}{'claim (ratio)':>22}{'wall':>10}{'findAndModify':>32}{'wall':>10}")
    first: float | None = None
    queues = [Queue(pending=100), Queue(pending=1000), Queue(pending=20_000), Queue(pending=1000, consumed=20_000)]
    for number, queue in enumerate(queues):
        database = Database(uri, name=f"queue_{number}", timeout_s=120)
        store = MongoStore(database, rng=random.Random(number))
        await store.prepare()
        await fill(database, store, queue)
        watch = await measure_claims(store, server_pid=server_pid, num_claims=num_claims)
        num_usual = 20 if queue.pending <= 100 else 5
        usual = await measure_usual(database, server_pid=server_pid, num_claims=num_usual)
        cost = 1e3 * watch.server_s / num_claims
        first = first or cost
        print(
            f"{queue.name:<28}{cost:>15.2f} ({cost / first:.2f}){1e3 * watch.wall_s / num_claims:>10.2f}"
            f"{1e3 * usual.server_s / num_usual:>32.1f}{1e3 * usual.wall_s / num_usual:>10.1f}"
        )
        await store.close()
    await measure_duplicates(uri, server_pid=server_pid, num_tasks=1000, num_claimers=num_claimers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--claims", type=int, default=400, help="claims per queue, a multiple of 50")
    parser.add_argument("--claimers", type=int, default=32)
    arguments = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        server = start_embedded(Path(directory) / "data", port=port, log_path=Path(directory) / "server.log")
        try:
            asyncio.run(
                run(
                    server.uri,
                    server_pid=server.pid,
                    num_claims=arguments.claims,
                    num_claimers=arguments.claimers,
                )
            )
        finally:
            server.stop()


if __name__ == "__main__":
    main()
