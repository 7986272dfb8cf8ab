"""`agentrl audit` on a finished run of synthetic Records in the embedded database: seconds and Records per second.

    python benchmarks/audit.py [--records 10000]

Groups of 8, three turns each, two of them with a tool call; every group is trained, 12 to a step. The documents are
those the store writes, put there in bulk. The audit must come out clean, and find one falsified token afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pymongo

from agentrl.algo.settle import settle_group
from agentrl.config import RolloutConfig, RunConfig
from agentrl.inspector.audit import audit_run
from agentrl.inspector.audit_report import AuditReport
from agentrl.store import open_store
from agentrl.store.dispatch_documents import turn_to_documents
from agentrl.store.documents import record_to_document, settlement_to_document, task_to_document
from agentrl.store.embedded import EmbeddedServer, start_embedded
from agentrl.store.indexes import DISPATCH, POLICY_VERSION, RECORD, SEQUENCE, TASK, TOKEN_PART, TRAIN_STEP
from agentrl.store.ledger_documents import policy_to_document, sequence_to_document, step_to_document
from agentrl.store.turns import extend_record
from agentrl.types import (
    DBRecordData,
    DispatchedSamplingTask,
    DispatchKind,
    GroupSettlement,
    PolicyVersion,
    Record,
    RecordStatus,
    StepStatus,
    StopReason,
    Task,
    TaskStatus,
    TrainStep,
    Turn,
    TurnTokens,
    VersionSpan,
)

GENERATIONS = 8
TASKS_PER_STEP = 12
TURNS = 3
PROMPT_TOKENS = (180, 60, 60)  # of each turn
COMPLETION_TOKENS = (90, 60, 40)
TOOL_RESULT = "result " * 40
BATCH = 1000
NOW = datetime(2026, 1, 1, tzinfo=UTC)
CONFIG = RunConfig(rollout=RolloutConfig(num_generations=GENERATIONS))
Group = tuple[Task, list[Record], dict[str, list[Turn]], GroupSettlement, list[DBRecordData]]


def make_turn(record: Record, *, question: tuple[int, ...], version: int, rng: random.Random) -> Turn:
    """The next turn; all but the last one call a tool."""
    index = len(record.turn_ids)
    num_sampled = COMPLETION_TOKENS[index]
    tokens = TurnTokens(
        parent_turn=index - 1,
        prompt_ids=tuple(rng.choices(range(50_000), k=PROMPT_TOKENS[index])) if index else question,
        completion_ids=tuple(rng.choices(range(50_000), k=num_sampled)),
        logprobs=tuple(-rng.randrange(1, 4096) / 512 for _ in range(num_sampled)),
        version_spans=(VersionSpan(version=version, start=0, end=num_sampled),),
        finish_reason="stop",
    )
    model = DispatchedSamplingTask(
        id=f"{record.id}/{index:03d}.1",
        record_id=record.id,
        task_id=record.task_id,
        turn=index,
        index=0,
        kind=DispatchKind.MODEL,
        target="service-0",
        status="ok",
        request={"temperature": 1.0, "max_new_tokens": 1024},
        response={"text": "word " * num_sampled},
        started_at=NOW,
        finished_at=NOW + timedelta(seconds=1),
        tokens=tokens,
    )
    if index == TURNS - 1:
        return Turn(model=model)
    request = {"name": "search", "arguments": {"query": "capital of France"}, "call_id": "call-1"}
    tool = replace(model, id=f"{model.id}/1", index=1, kind=DispatchKind.TOOL, target="search.search", tokens=None)
    return Turn(model=model, tools=(replace(tool, request=request, response={"content": TOOL_RESULT}),))


def make_group(number: int, *, rng: random.Random) -> Group:
    """A settled group, sampled by the version its step trains or the one before."""
    task = Task(
        id=f"train:0:q{number}", item_id=f"q{number}", split="train", epoch=0, query="?", answer="!",
        num_generations=GENERATIONS,
    )  # fmt: skip
    version = max(0, number // TASKS_PER_STEP - rng.randrange(2))
    records, turns = [], {}
    question = tuple(rng.choices(range(50_000), k=PROMPT_TOKENS[0]))
    for generation in range(GENERATIONS):
        record = Record(
            id=f"{task.id}/g{generation}", task_id=task.id, split="train", generation=generation, fence=1,
            status=RecordStatus.RUNNING, started_at=NOW,
        )  # fmt: skip
        made = []
        for _ in range(TURNS):
            made.append(make_turn(record, question=question, version=version, rng=rng))
            record = extend_record(record, made[-1])
        score = float(rng.random() < 0.5) if generation > 1 else float(generation)
        final = replace(record, status=RecordStatus.FINISHED, stop_reason=StopReason.ANSWER, score=score, scorer="em")
        records.append(final)
        turns[record.id] = made
    settlement, rows = settle_group(task, records, turns, algo=CONFIG.algo, min_turns=CONFIG.rollout.min_turns)
    return task, records, turns, settlement, rows


def group_documents(group: Group, *, step: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """What the store holds of a consumed group."""
    task, records, turns, settlement, rows = group
    yield (
        TASK,
        task_to_document(task, slot=0)
        | {
            "status": TaskStatus.CONSUMED.value,
            "fence": 1,
            "settlement": settlement_to_document(settlement, sequences=[row.summary for row in rows]),
            "mean_tool_calls": float(TURNS - 1),
            "settled_at": NOW,
            "consumed_step": step,
        },
    )
    for record in records:
        yield RECORD, record_to_document(record)
        for turn in turns[record.id]:
            for encoded in turn_to_documents(turn):
                yield DISPATCH, encoded.document
                yield from ((TOKEN_PART, part) for part in encoded.parts)
    for row in rows:
        yield SEQUENCE, sequence_to_document(row).document


def make_step(number: int, groups: Sequence[Group]) -> TrainStep:
    """The committed ledger entry of a step."""
    rows = [row for group in groups for row in group[4]]
    ages = [number - 1 - row.summary.min_policy_version for row in rows]
    return TrainStep(
        step=number,
        status=StepStatus.COMMITTED,
        policy_version=number - 1,
        task_ids=tuple(group[0].id for group in groups),
        sequence_ids=tuple(row.id for row in rows),
        metrics={
            "num_trained_tokens": float(sum(row.summary.num_trained_tokens for row in rows)),
            "num_tokens": float(sum(row.summary.num_tokens for row in rows)),
            "num_sequences": float(len(rows)),
            "staleness_max": float(max(ages)),
        },
        planned_at=NOW + timedelta(minutes=number),
        committed_at=NOW + timedelta(minutes=number, seconds=30),
    )


def fill(uri: str, database: str, *, num_groups: int) -> None:
    """Write the run, batch by batch."""
    rng = random.Random(0)
    with pymongo.MongoClient[dict[str, Any]](uri) as client:
        target = client[database]
        target[POLICY_VERSION].insert_one(policy_to_document(PolicyVersion(version=0, path="v0", created_at=NOW)))
        for number, start in enumerate(range(0, num_groups, TASKS_PER_STEP), start=1):
            groups = [make_group(k, rng=rng) for k in range(start, min(start + TASKS_PER_STEP, num_groups))]
            batch: dict[str, list[dict[str, Any]]] = {}
            for group in groups:
                for kind, document in group_documents(group, step=number):
                    batch.setdefault(kind, []).append(document)
            batch[TOKEN_PART] = list({part["_id"]: part for part in batch.get(TOKEN_PART, [])}.values())
            for kind, documents in batch.items():
                for first in range(0, len(documents), BATCH):
                    target[kind].insert_many(documents[first : first + BATCH], ordered=False)
            target[TRAIN_STEP].insert_one(step_to_document(make_step(number, groups)))
            policy = PolicyVersion(version=number, path=f"v{number}", created_at=NOW)
            target[POLICY_VERSION].insert_one(policy_to_document(policy))


async def audit(uri: str, database: str, *, server: EmbeddedServer, is_first: bool) -> AuditReport:
    """One audit, with what it cost."""
    store = open_store(uri, database=database, timeout_s=120)
    await store.prepare()
    processes = {"server": psutil.Process(server.pid), "audit": psutil.Process()}
    before = {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}
    report = await audit_run(store, config=CONFIG, run_dir=None)
    cpu = {name: sum(process.cpu_times()[:2]) - before[name] for name, process in processes.items()}
    await store.close()
    if is_first:
        print(
            f"{report.counts['records']} records, {report.counts['turns']} turns, {report.counts['rows']} rows: "
            f"{report.seconds:.1f} s, {report.counts['records'] / report.seconds:.0f} records/s, "
            f"CPU {cpu['audit']:.1f} s audit and {cpu['server']:.1f} s server, "
            f"peak memory {psutil.Process().memory_info().rss / 2**20:.0f} MiB"
        )
    return report


async def run(server: EmbeddedServer, *, num_records: int) -> None:
    database = "audit"
    prepared = open_store(server.uri, database=database)
    await prepared.prepare()
    await prepared.close()
    started = time.perf_counter()
    await asyncio.to_thread(fill, server.uri, database, num_groups=num_records // GENERATIONS)
    print(f"written in {time.perf_counter() - started:.0f} s")
    report = await audit(server.uri, database, server=server, is_first=True)
    print(f"clean: {report.is_clean}", *[finding for result in report.results for finding in result.findings])
    with pymongo.MongoClient[dict[str, Any]](server.uri) as client:
        client[database][RECORD].update_one({"_id": "train:0:q7/g3"}, {"$inc": {"num_completion_tokens": 1}})
    report = await audit(server.uri, database, server=server, is_first=False)
    print(f"after one counter was falsified: {sorted(report.found)}, {report.num_findings} finding")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=10_000)
    arguments = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        server = start_embedded(Path(directory) / "data", port=port, log_path=Path(directory) / "server.log")
        try:
            asyncio.run(run(server, num_records=arguments.records))
        finally:
            server.stop()


if __name__ == "__main__":
    main()
