"""Group commit of turns on the embedded server: wall clock and server CPU per turn, against two ways without it.

    python benchmarks/store_commit.py [--rollouts 96] [--rounds 5]

`batched`      all rollouts share one store: what a sampler process does
`concurrent`   every rollout has its own store on the same connections: no sharing of batches
`one by one`   one commit after the other
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import psutil

from agentrl.store.connection import Database
from agentrl.store.embedded import start_embedded
from agentrl.store.mongo import MongoStore
from agentrl.types import DispatchedSamplingTask, DispatchKind, Record, Task, Turn, TurnTokens, VersionSpan

PROMPT_TOKENS = 200
COMPLETION_TOKENS = 300
TOOL_RESULT = "result " * 100
NOW = datetime(2026, 1, 1, tzinfo=UTC)
Commit = Callable[[Sequence[MongoStore], Sequence[Record]], Awaitable[list[Record]]]


def make_turn(record: Record) -> Turn:
    """A turn of a usual size with one tool call."""
    index = len(record.turn_ids)
    tokens = TurnTokens(
        parent_turn=index - 1,
        prompt_ids=tuple(range(PROMPT_TOKENS)),
        completion_ids=tuple(range(COMPLETION_TOKENS)),
        logprobs=tuple(-random.random() for _ in range(COMPLETION_TOKENS)),
        version_spans=(VersionSpan(version=0, start=0, end=COMPLETION_TOKENS),),
        finish_reason="stop",
    )
    model = DispatchedSamplingTask(
        id=f"{record.id}/{index}.{record.fence}",
        record_id=record.id,
        task_id=record.task_id,
        turn=index,
        index=0,
        kind=DispatchKind.MODEL,
        target="service-0",
        status="ok",
        request={"temperature": 1.0, "max_new_tokens": 1024},
        response={"text": "word " * COMPLETION_TOKENS},
        started_at=NOW,
        finished_at=NOW,
        tokens=tokens,
    )
    request = {"name": "search", "arguments": {"query": "capital of France"}, "call_id": "call-1"}
    tool = replace(
        model,
        id=f"{model.id}/1",
        index=1,
        kind=DispatchKind.TOOL,
        target="search.search",
        tokens=None,
        request=request,
        response={"content": TOOL_RESULT},
    )
    return Turn(model=model, tools=(tool,))


async def batched(stores: Sequence[MongoStore], records: Sequence[Record]) -> list[Record]:
    return await asyncio.gather(*(stores[0].commit_turn(record, make_turn(record)) for record in records))


async def concurrent(stores: Sequence[MongoStore], records: Sequence[Record]) -> list[Record]:
    pairs = zip(stores, records, strict=True)
    return await asyncio.gather(*(store.commit_turn(record, make_turn(record)) for store, record in pairs))


async def one_by_one(stores: Sequence[MongoStore], records: Sequence[Record]) -> list[Record]:
    return [await stores[0].commit_turn(record, make_turn(record)) for record in records]


async def measure(name: str, commit: Commit, *, uri: str, server_pid: int, rollouts: int, rounds: int) -> float:
    """Print wall and CPU per turn; returns the wall seconds per turn."""
    database = Database(uri, name=name.replace(" ", "_"), timeout_s=60)
    stores = [MongoStore(database, rng=random.Random(k)) for k in range(rollouts)]
    await stores[0].prepare()
    task = Task(id="train:0:q", item_id="q", split="train", epoch=0, query="?", answer="!", num_generations=rollouts)
    await stores[0].insert_tasks([task])
    (claim,) = await stores[0].claim_tasks(split="train", owner="benchmark", lease_s=3600, limit=1)
    records = await commit(stores, await stores[0].open_records(claim))
    server, client = psutil.Process(server_pid), psutil.Process()
    started = time.perf_counter()
    server_before, client_before = server.cpu_times(), client.cpu_times()
    for _ in range(rounds):
        records = await commit(stores, records)
    wall_s = time.perf_counter() - started
    server_after, client_after = server.cpu_times(), client.cpu_times()
    num_turns = rollouts * rounds
    server_s = server_after.user + server_after.system - server_before.user - server_before.system
    client_s = client_after.user + client_after.system - client_before.user - client_before.system
    print(
        f"{name:<12} {num_turns / wall_s:8.0f} turns/s   wall {1e3 * wall_s / num_turns:6.2f} ms/turn   "
        f"server CPU {1e3 * server_s / num_turns:5.2f} ms/turn   client CPU {1e3 * client_s / num_turns:5.2f} ms/turn"
    )
    await database.close()
    return wall_s / num_turns


async def run(*, uri: str, server_pid: int, rollouts: int, rounds: int) -> None:
    modes: list[tuple[str, Commit]] = [("batched", batched), ("concurrent", concurrent), ("one by one", one_by_one)]
    walls = {
        name: await measure(name, commit, uri=uri, server_pid=server_pid, rollouts=rollouts, rounds=rounds)
        for name, commit in modes
    }
    for name in ("concurrent", "one by one"):
        print(f"{name} takes {walls[name] / walls['batched']:.1f} times the wall clock of batched")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=96, help="commits in flight at once")
    parser.add_argument("--rounds", type=int, default=5, help="turns each rollout commits")
    arguments = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        server = start_embedded(Path(directory) / "data", port=port, log_path=Path(directory) / "server.log")
        try:
            asyncio.run(
                run(uri=server.uri, server_pid=server.pid, rollouts=arguments.rollouts, rounds=arguments.rounds)
            )
        finally:
            server.stop()


if __name__ == "__main__":
    main()
