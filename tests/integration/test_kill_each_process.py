"""kill -9 of sampler, engine, trainer and database in one run: nothing is lost, nothing is trained twice."""

import asyncio
import json
import os
import signal
import socket
from collections import Counter
from pathlib import Path

import pytest

from agentrl.store import MongoStore, open_store
from agentrl.store.embedded import start_embedded
from agentrl.types import StepStatus, TaskStatus
from launched_run import DEADLINE_S, launch, process_ids, read_until, wait_until_nothing_is_left, write_run

pytestmark = pytest.mark.timeout(400)

VICTIMS = {2: " sample ", 4: " serve ", 6: " train ", 8: "secantusd"}
"""Step after which a process is killed -> what its command line contains."""
NUM_STEPS = 10


def test_a_run_whose_every_process_was_killed_once_finishes_with_a_clean_ledger(tmp_path: Path) -> None:
    folder = write_run(tmp_path, max_steps=NUM_STEPS, lease_s=3)
    with launch(folder) as run:
        for step, mark in VICTIMS.items():
            read_until(run, f"step {step}/{NUM_STEPS}")
            kill_one(folder, mark)
        read_until(run, "agentrl eval tiny")
        assert run.wait(timeout=DEADLINE_S) == 0
    wait_until_nothing_is_left(folder)
    metrics = (folder / "output" / "tiny" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in metrics] == [*range(1, NUM_STEPS + 1)]
    server = start_embedded(folder / "data" / "database", port=find_port(), log_path=folder / "check.log")
    try:
        asyncio.run(check_ledger(server.uri))
    finally:
        server.stop()


def kill_one(folder: Path, mark: str) -> None:
    """SIGKILL the run's process whose command line contains `mark`: found by its working directory, ended by pid."""
    victims = process_ids(folder, mark)
    assert victims, f"no process with {mark!r}"
    os.kill(min(victims), signal.SIGKILL)


def find_port() -> int:
    """A port nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def check_ledger(uri: str) -> None:
    """Every consumed group complete, every row trained in exactly one step, every step committed."""
    store: MongoStore = open_store(uri, database="tiny")
    await store.prepare()
    steps = await store.list_steps()
    assert [step.step for step in steps] == [*range(1, NUM_STEPS + 1)]
    assert all(step.status is StepStatus.COMMITTED for step in steps)
    trained = Counter(row_id for step in steps for row_id in step.sequence_ids)
    assert set(trained.values()) == {1}
    assert len(await store.load_sequences(list(trained))) == len(trained)
    consumed = Counter(task_id for step in steps for task_id in step.task_ids)
    assert set(consumed.values()) == {1}
    for task_id in consumed:
        records = await store.list_records(task_id=task_id)
        assert sorted(record.generation for record in records) == [0, 1]
        assert all(record.is_final for record in records)
        for record in records:
            turns = await store.load_turns(record)
            assert [turn.index for turn in turns] == [*range(len(record.turn_ids))]
    counts = await store.count_tasks(split="train")
    assert counts[TaskStatus.RUNNING] <= 4  # what was in flight when the run ended may wait for its lease
    await store.close()
