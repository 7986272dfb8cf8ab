"""What the kill campaign believes: its own reading of a run's documents, through the plain driver.

Nothing here uses the product's store. A shadow of every turn that was ever seen committed, by a reader or by the
sampler whose commit was acknowledged, is compared with the database again and again.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bson
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient

TIMEOUT_MS = 20_000
RAW: CodecOptions[RawBSONDocument] = CodecOptions(document_class=RawBSONDocument)
DONE = ("settled", "consumed")


@dataclass(slots=True)
class Findings:
    """Broken promises, in words."""

    lost: list[str] = field(default_factory=list)  # committed turns that are gone or changed
    duplicated: list[str] = field(default_factory=list)  # Records of one (task, epoch, generation), turns of one place
    trained_twice: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    audit: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[str]:
        """All of them."""
        return iter([*self.lost, *self.duplicated, *self.trained_twice, *self.skipped, *self.audit])


class Reader:
    """Reads one run's database. Blocking; waits for the server."""

    def __init__(self, uri: str, *, database: str) -> None:
        self._client: MongoClient[dict[str, Any]] = MongoClient(
            uri, serverSelectionTimeoutMS=TIMEOUT_MS, socketTimeoutMS=TIMEOUT_MS
        )
        self._database = self._client[database]

    def close(self) -> None:
        """Disconnect."""
        self._client.close()

    def tasks(self, query: Mapping[str, Any], *fields: str) -> list[dict[str, Any]]:
        """Tasks, with these fields or whole."""
        return list(self._database["Task"].find(query, dict.fromkeys(fields, 1) or None))

    def records(self, query: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Record headers."""
        return list(self._database["Record"].find(query))

    def steps(self) -> list[dict[str, Any]]:
        """The ledger, in order."""
        return sorted(self._database["TrainStep"].find({}), key=lambda step: step["_id"])

    def last_step(self) -> dict[str, Any] | None:
        """The newest entry of the ledger."""
        steps = self.steps()
        return steps[-1] if steps else None

    def phase(self, pid: int) -> str:
        """What the process says it is doing; empty before its first heartbeat."""
        worker = self._database["Worker"].find_one({"pid": pid})
        return "" if worker is None else str(worker["phase"])

    def working_pids(self) -> set[int]:
        """Processes that ever had a heartbeat as a worker."""
        return {worker["pid"] for worker in self._database["Worker"].find({}, {"pid": 1})}

    def serving_pids(self) -> set[int]:
        """Processes of the inference services that are up."""
        services = self._database["InferenceService"].find({"status": "UP"}, {"_id": 1})
        return {int(service["_id"].split("-")[-2]) for service in services}

    def row_tasks(self) -> dict[str, str]:
        """Training row -> its Task."""
        return {row["_id"]: row["task_id"] for row in self._database["DBRecordData"].find({}, {"task_id": 1})}

    def turn_documents(self, turn_ids: Sequence[str]) -> list[RawBSONDocument]:
        """All documents of turns, as their bytes."""
        raw = self._database.get_collection("DispatchedSamplingTask", codec_options=RAW)
        return list(raw.find({"turn_id": {"$in": list(turn_ids)}}))


class Shadow:
    """Every committed turn of one run, as it was first seen, and what its sampler said it committed."""

    def __init__(self, reader: Reader, *, folder: Path) -> None:
        self._reader = reader
        self._folder = folder
        self._digests: dict[str, dict[str, str]] = {}  # turn id -> document id -> digest
        self._places: dict[str, tuple[str, int]] = {}  # turn id -> Record, index
        self._witnessed: dict[str, dict[str, Any]] = {}
        self._read_bytes: dict[Path, int] = {}
        self._unchecked: set[str] = set()

    @property
    def num_turns(self) -> int:
        """Committed turns known."""
        return len(self._places.keys() | self._witnessed.keys())

    def note(self) -> None:
        """Take in what is committed now, and what samplers say was."""
        self._read_witnesses()
        new = {
            turn_id: (header["_id"], index)
            for header in self._reader.records({})
            for index, turn_id in enumerate(header["turn_ids"])
            if turn_id not in self._places
        }
        for document in self._reader.turn_documents(list(new)):
            self._digests.setdefault(document["turn_id"], {})[document["_id"]] = digest(document)
        self._places |= new
        self._unchecked |= new.keys()

    def check(self, *, everything: bool) -> list[str]:
        """Committed turns that are lost or changed. Not `everything`: those noted since the check before last."""
        self._read_witnesses()
        headers = {header["_id"]: header["turn_ids"] for header in self._reader.records({})}
        lost = [
            f"turn {turn_id} is no more in {record_id}"
            for turn_id, (record_id, index) in self._known_places().items()
            if turn_id not in headers.get(record_id, ())[index : index + 1]
        ]
        chosen = self._digests.keys() if everything else self._unchecked | self._witnessed.keys() - self._digests.keys()
        found: dict[str, dict[str, RawBSONDocument]] = {}
        for document in self._reader.turn_documents(sorted(chosen)):
            found.setdefault(document["turn_id"], {})[document["_id"]] = document
        for turn_id in chosen:
            lost += self._changes(turn_id, found.get(turn_id, {}))
        self._unchecked = set()
        return lost

    def _known_places(self) -> dict[str, tuple[str, int]]:
        told = {turn_id: (turn["record_id"], turn["index"]) for turn_id, turn in self._witnessed.items()}
        return told | self._places

    def _changes(self, turn_id: str, documents: Mapping[str, RawBSONDocument]) -> Iterable[str]:
        if not documents:
            yield f"turn {turn_id} has no documents"
            return
        if {key: digest(document) for key, document in documents.items()} != self._digests.get(turn_id, {}):
            if turn_id in self._digests:
                yield f"turn {turn_id} changed"
            else:
                self._digests[turn_id] = {key: digest(document) for key, document in documents.items()}
        told = self._witnessed.get(turn_id)
        if told is not None and stored_turn(documents.values()) != told_turn(told):
            yield f"turn {turn_id} is not what its sampler committed"

    def _read_witnesses(self) -> None:
        """Lines that are complete; the last one may be cut by the kill."""
        for path in sorted(self._folder.glob("*.turns")):
            with path.open("rb") as lines:
                lines.seek(self._read_bytes.get(path, 0))
                text = lines.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read_bytes[path] = self._read_bytes.get(path, 0) + len(whole)
            for line in whole.splitlines():
                turn = json.loads(line)
                self._witnessed[turn["turn_id"]] = turn


def digest(document: RawBSONDocument) -> str:
    """Of the document's bytes."""
    return hashlib.sha256(document.raw).hexdigest()


def stored_turn(documents: Iterable[RawBSONDocument]) -> tuple[bytes, tuple[str, ...]]:
    """Prompt ids, completion ids and log-probs as bytes (small ones lie in the document), and the tools' results."""
    by_length = sorted((bson.decode(document.raw) for document in documents), key=lambda call: len(call["_id"]))
    model, *tools = by_length  # <turn>, then <turn>/1, <turn>/2 ...
    tools.sort(key=lambda call: int(call["_id"].rsplit("/", 1)[1]))
    return bytes(model["payload"]["bytes"]), tuple(call["response"]["content"] for call in tools)


def told_turn(turn: Mapping[str, Any]) -> tuple[bytes, tuple[str, ...]]:
    """The same of a sampler's own words: int32 ids, float32 log-probs, little endian."""
    ids = [*turn["prompt_ids"], *turn["completion_ids"]]
    packed = struct.pack(f"<{len(ids)}i", *ids) + struct.pack(f"<{len(turn['logprobs'])}f", *turn["logprobs"])
    return packed, tuple(turn["tools"])


def check_records(reader: Reader) -> list[str]:
    """One Record per (task, epoch, generation), one turn per place, and finished groups complete."""
    headers = reader.records({})
    tasks = {task["_id"]: task for task in reader.tasks({}, "split", "epoch", "item_id", "num_generations", "status")}
    wrong: list[str] = []
    places: Counter[tuple[str, str, int, int]] = Counter()
    generations: dict[str, set[int]] = {}
    for header in headers:
        task = tasks[header["task_id"]]
        places[task["split"], task["item_id"], task["epoch"], header["generation"]] += 1
        generations.setdefault(task["_id"], set()).add(header["generation"])
        turns = [turn_id.rsplit("/", 1)[1].split(".")[0] for turn_id in header["turn_ids"]]
        if [int(turn) for turn in turns] != [*range(header["num_turns"])]:
            wrong.append(f"{header['_id']} has the turns {turns}")
    wrong += [f"{count} Records of {place}" for place, count in places.items() if count > 1]
    wrong += [
        f"{task_id} is {task['status']} with generations {sorted(generations.get(task_id, ()))}"
        for task_id, task in tasks.items()
        if task["status"] in DONE and generations.get(task_id) != {*range(task["num_generations"])}
    ]
    return wrong


def check_training(
    reader: Reader, *, weights: Sequence[tuple[int, Sequence[str]]] | None
) -> tuple[list[str], list[str]]:
    """(trained twice, skipped). `weights`: what the trainer's checkpoint says it trained, step by step."""
    closed = [step for step in reader.steps() if step["status"] == "committed"]  # before the Tasks that they consumed
    tasks = {task["_id"]: task for task in reader.tasks({"status": {"$in": list(DONE)}})}
    rows, steps = reader.row_tasks(), reader.steps()  # after them: a step consumes what it has planned
    trained = Counter(row_id for step in steps for row_id in step["sequence_ids"])
    twice = [f"{row_id} is in {count} steps" for row_id, count in trained.items() if count > 1]
    skipped = [f"step {step['_id']} follows {n}" for n, step in enumerate(steps) if step["_id"] != n + 1]
    for step in closed:
        skipped += _unfinished(step, tasks)
    for task_id, task in tasks.items():
        skipped += _skipped_rows(task_id, task, trained=trained, rows=rows)
    for step_number, row_ids in weights or ():
        planned = steps[step_number - 1]["sequence_ids"] if step_number <= len(steps) else []
        if list(row_ids) != list(planned):
            skipped.append(f"the weights trained {row_ids} in step {step_number}, the ledger says {planned}")
    numbers = [number for number, _ in weights or ()]
    if numbers != [*range(1, len(numbers) + 1)]:
        twice.append(f"the weights went through the steps {numbers}")
    return twice, skipped


def _unfinished(step: Mapping[str, Any], tasks: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for task_id in step["task_ids"]:
        task = tasks.get(task_id, {})
        if (task.get("status"), task.get("consumed_step")) != ("consumed", step["_id"]):
            yield f"step {step['_id']} used {task_id}, which is {task.get('status')} by {task.get('consumed_step')}"


def _skipped_rows(
    task_id: str, task: Mapping[str, Any], *, trained: Mapping[str, int], rows: Mapping[str, str]
) -> Iterator[str]:
    named = {row["id"] for row in task["settlement"]["sequences"]}
    stored = {row_id for row_id, owner in rows.items() if owner == task_id}
    if named != stored:
        yield f"{task_id} settled with {sorted(named)}, stored are {sorted(stored)}"
    is_eligible = task["settlement"]["outcome"] == "trainable" and not task.get("drop_reason")
    if task["status"] == "consumed" and is_eligible and not all(trained.get(row_id) for row_id in named):
        yield f"{task_id} was consumed by step {task.get('consumed_step')} without being trained"
    if task["status"] == "consumed" and not is_eligible and any(trained.get(row_id) for row_id in named):
        yield f"{task_id} was dropped ({task.get('drop_reason')}) and trained"
