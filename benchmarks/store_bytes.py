"""Bytes of one long trajectory: as the store keeps it, against full message lists and log-prob objects per call.

    python benchmarks/store_bytes.py [--turns 100] [--generations 8]

Each turn adds about 60 tokens: a completion of 40, 15 of them a tool call, and a tool result of 20. The other layout is
what logging the requests and replies of a chat API client gives: per call the tools and the whole conversation so far,
and per sampled token an object with its text, bytes and log-prob. The document of a tool call (server, status, times,
arguments, result) is the same in both. Counted as BSON, without indexes. The group shares a prompt of 400 tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import bson

from agentrl.store.connection import Database
from agentrl.store.dispatch_documents import turn_to_documents
from agentrl.store.embedded import start_embedded
from agentrl.store.mongo import MongoStore
from agentrl.store.sizes import measure
from agentrl.types import DispatchedSamplingTask, DispatchKind, Record, Task, Turn, TurnTokens, VersionSpan

PROMPT_TOKENS = 400
COMPLETION_TOKENS = 40
CALL_TOKENS = 15  # of the completion
TOOL_TOKENS = 20
VOCABULARY = [" the", " of", "ing", " search", " capital", "tion", " France", "<|im_end|>", " is", " 1998", "ed", "\n"]
ARGUMENTS = '{"query": "capital of France"}'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {argument: {"type": "string", "description": f"The {argument}."}},
                "required": [argument],
            },
        },
    }
    for name, description, argument in (
        ("search", "Search the encyclopedia; returns the best passages.", "query"),
        ("calculate", "Evaluate an arithmetic expression.", "expression"),
    )
]
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def words(rng: random.Random, count: int) -> list[str]:
    return [rng.choice(VOCABULARY) for _ in range(count)]


def make_turn(record: Record, *, prompt: Sequence[str], completion: Sequence[str], tool: str | None) -> Turn:
    """What a sampler commits for one call."""
    index = len(record.turn_ids)
    rng = random.Random(index)
    tokens = TurnTokens(
        parent_turn=index - 1,
        prompt_ids=tuple(1000 + VOCABULARY.index(word) for word in prompt),
        completion_ids=tuple(1000 + VOCABULARY.index(word) for word in completion),
        logprobs=tuple(-rng.random() for _ in completion),
        version_spans=(VersionSpan(version=3, start=0, end=len(completion)),),
        finish_reason="stop",
    )
    model = DispatchedSamplingTask(
        id=f"{record.id}/{index:03d}.{record.fence}",
        record_id=record.id,
        task_id=record.task_id,
        turn=index,
        index=0,
        kind=DispatchKind.MODEL,
        target="embedded-host-1-30000",
        status="ok",
        request={"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_new_tokens": 64},
        response={"text": "".join(completion), "num_cached_tokens": 60 * index},
        started_at=NOW,
        finished_at=NOW,
        tokens=tokens,
    )
    if tool is None:
        return Turn(model=model)
    call = {"name": "search", "arguments": json.loads(ARGUMENTS), "call_id": f"call-{index}"}
    return Turn(
        model=model,
        tools=(
            replace(
                model,
                id=f"{model.id}/1",
                index=1,
                kind=DispatchKind.TOOL,
                target="search.search",
                tokens=None,
                request=call,
                response={"content": tool},
            ),
        ),
    )


def assistant(completion: Sequence[str], *, index: int) -> dict[str, Any]:
    """A completion as a message of a chat API: the call is parsed out of the text."""
    call = {"id": f"call-{index}", "type": "function", "function": {"name": "search", "arguments": ARGUMENTS}}
    absent = dict.fromkeys(("refusal", "annotations", "audio", "function_call"))  # as clients dump messages
    return {"role": "assistant", "content": "".join(completion[:-CALL_TOKENS]), **absent, "tool_calls": [call]}


def chat_call(messages: Sequence[dict[str, Any]], *, completion: Sequence[str], index: int) -> dict[str, Any]:
    """The same call as a log of a chat API keeps it."""
    rng = random.Random(index)
    logprobs = [
        {"token": word, "logprob": -rng.random(), "bytes": list(word.encode()), "top_logprobs": []}
        for word in completion
    ]
    return {
        "_id": f"train:0:q/g0/{index:03d}",
        "task_id": "train:0:q",
        "request": {"messages": list(messages), "tools": TOOLS, "temperature": 1.0, "max_tokens": 64},
        "response": {
            "id": f"chatcmpl-{index}",
            "object": "chat.completion",
            "created": 1767225600,
            "model": "policy",
            "usage": {"prompt_tokens": 60 * index, "completion_tokens": len(completion), "total_tokens": 60 * index},
            "choices": [{
                "message": assistant(completion, index=index),
                "logprobs": {"content": logprobs},
                "finish_reason": "stop",
            }],
        },
        "started_at": NOW,
        "finished_at": NOW,
    }  # fmt: skip


async def write_trajectory(store: MongoStore, record: Record, *, turns: int) -> int:
    """Commit the trajectory; returns the bytes it takes in the other layout."""
    rng = random.Random(record.generation)
    first = words(random.Random(7), PROMPT_TOKENS)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "".join(first)}]
    prompt, chat_bytes = first, 0
    for index in range(turns):
        completion, result = words(rng, COMPLETION_TOKENS), words(rng, TOOL_TOKENS)
        tool = None if index == turns - 1 else "".join(result)
        turn = make_turn(record, prompt=prompt, completion=completion, tool=tool)
        record = await store.commit_turn(record, turn)
        chat_bytes += len(bson.encode(chat_call(messages, completion=completion, index=index)))
        chat_bytes += sum(len(bson.encode(encoded.document)) for encoded in turn_to_documents(turn)[1:])
        messages += [
            assistant(completion, index=index),
            {"role": "tool", "content": "".join(result), "tool_call_id": f"call-{index}"},
        ]
        prompt = result
    assert len(await store.load_turns(record)) == turns
    return chat_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Bytes of one trajectory in both layouts, and of the group's prompt."""

    chat_bytes: int
    stored_bytes: int
    prompt_bytes_named: int
    prompt_bytes_stored: int


async def compare(uri: str, *, name: str, turns: int, generations: int) -> Comparison:
    """Write a group of trajectories into database `name` and measure."""
    database = Database(uri, name=name, timeout_s=60)
    store = MongoStore(database, rng=random.Random(0))
    await store.prepare()
    task = Task(id="train:0:q", item_id="q", split="train", epoch=0, query="?", answer="!", num_generations=generations)
    await store.insert_tasks([task])
    (claim,) = await store.claim_tasks(split="train", owner="benchmark", lease_s=3600, limit=1)
    records = await store.open_records(claim)
    chat_bytes = sum([await write_trajectory(store, record, turns=turns) for record in records]) // generations
    size = await measure(database)
    await store.close()
    return Comparison(
        chat_bytes=chat_bytes,
        stored_bytes=size.trajectory_bytes // generations,
        prompt_bytes_named=size.prompt_bytes_named,
        prompt_bytes_stored=size.prompt_bytes_stored,
    )


def show(found: Comparison, *, turns: int, generations: int) -> None:
    saved = found.prompt_bytes_named - found.prompt_bytes_stored
    ratio = found.chat_bytes / found.stored_bytes
    print(f"{turns} turns of {COMPLETION_TOKENS} + {TOOL_TOKENS} tokens, {generations} trajectories; bytes of one")
    print(f"  full messages and log-prob objects per call  {found.chat_bytes:>10,}")
    print(f"  as stored                                    {found.stored_bytes:>10,}   1/{ratio:.1f}")
    print(f"  shared prompt: {found.prompt_bytes_named:,} bytes in the group, stored as {found.prompt_bytes_stored:,}, "
          f"saves {saved:,}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--generations", type=int, default=8, help="trajectories of the one group")
    arguments = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        server = start_embedded(Path(directory) / "data", port=port, log_path=Path(directory) / "server.log")
        try:
            sizes = {"turns": arguments.turns, "generations": arguments.generations}
            show(asyncio.run(compare(server.uri, name="bytes", **sizes)), **sizes)
        finally:
            server.stop()


if __name__ == "__main__":
    main()
