"""Whole runs under the modes of the tool journal, with tool servers as real processes and a real database."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl.chat import ChatFormat
from agentrl.cli.calls import open_calls
from agentrl.cli.journal import export_journal
from agentrl.config import (
    AlgoConfig,
    InferenceConfig,
    JournalConfig,
    RolloutConfig,
    RunConfig,
    StoreConfig,
    ToolsConfig,
)
from agentrl.errors import ArchiveError, UnavailableError
from agentrl.inference import EngineClient
from agentrl.inference.runner import EngineSettings
from agentrl.inference.serve import build_engine, listen, running_server
from agentrl.inspector.audit import audit_run
from agentrl.protocols import GenerationClient, Store
from agentrl.rollout.recorded_calls import load_recorded_calls
from agentrl.rollout.worker import run_sampler
from agentrl.store import MemoryStore, MongoStore, open_store
from agentrl.types import InferenceService, Record, RecordStatus, ServiceStatus, StopReason, Task, TaskStatus
from scripted_engine import ScriptedEngine
from tiny_chat import write_tiny_chat
from tool_calling_model import write_tool_calling_model

SERVER = Path(__file__).parents[1] / "data" / "tool_server.py"
NUM_TASKS, NUM_GENERATIONS = 6, 2
SERVICE = InferenceService(id="scripted", base_url="http://scripted", status=ServiceStatus.UP, policy_version=0)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat(tmp_path_factory.mktemp("chat"))


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def add_twice(context: str, depth: int) -> str:
    """Two calls in one turn, a third in the next, then the answer."""
    number = int(re.search(r"question (\d+)", context).group(1))  # type: ignore[union-attr]
    num_results = context.count("<tool_response>")
    if num_results == 0:
        return call("add", a=number, b=1) + call("pid")
    return call("echo", text=f"seen {number}") if num_results == 2 else "<answer>5</answer>"


def make_config(
    tmp_path: Path,
    *,
    num_epochs: int = 1,
    num_in_flight: int = 96,
    command: str = sys.executable,
    args: Sequence[str] = (str(SERVER),),
    **journal: Any,
) -> RunConfig:
    servers = tmp_path / f"servers-{Path(command).name}.json"
    entry = {"command": command, "args": list(args), "recovery": "stateless"}
    servers.write_text(json.dumps({"mcpServers": {"test": entry}}), encoding="utf-8")
    return RunConfig(
        store=StoreConfig(heartbeat_s=0.2, lease_s=30),
        tools=ToolsConfig(mcp_config=servers),
        rollout=RolloutConfig(
            num_generations=NUM_GENERATIONS,
            max_new_tokens=200,
            max_prompt_tokens=3000,
            num_train_epochs=num_epochs,
            max_concurrent_samples_per_process=num_in_flight,
        ),
        inference=InferenceConfig(context_length=4000),
        journal=JournalConfig(**journal),
        algo=AlgoConfig(tasks_per_step=100),
    )


@asynccontextmanager
async def real_engine(model_dir: Path) -> AsyncIterator[EngineClient]:
    """A new embedded engine with an empty cache, served over loopback."""
    settings = EngineSettings(model_path=model_dir, max_running_requests=16, context_length=4000, device="cpu")
    engine, tokenizer = await asyncio.to_thread(build_engine, settings)
    listener = listen(InferenceConfig())
    async with (
        running_server(engine, tokenizer, listener),
        EngineClient(f"http://127.0.0.1:{listener.getsockname()[1]}") as client,
    ):
        await client.update_weights_from_disk(str(model_dir), version="0")
        yield client


async def sample(
    store: Store,
    config: RunConfig,
    model_dir: Path,
    *,
    script: Any = add_twice,
    engine: GenerationClient | None = None,
) -> None:
    """A sampler until every Task of every epoch is settled; without an engine the script is played."""
    await store.insert_tasks(
        [
            Task(
                id=f"train:0:q{number}", item_id=f"q{number}", split="train", epoch=0, query=f"question {number}",
                answer="5", num_generations=NUM_GENERATIONS,
            )
            for number in range(NUM_TASKS)
        ]
    )  # fmt: skip
    await store.put_service(SERVICE)
    stop = asyncio.Event()
    async with open_calls(config, store=store) as calls:
        engine = engine or ScriptedEngine(model_dir, script)
        running = asyncio.create_task(
            run_sampler(
                config, store=store, toolbox=calls.toolbox, client=calls.paying(engine),
                chat=ChatFormat.load(model_dir), stop=stop, caller=calls.caller,
            )
        )  # fmt: skip
        wanted = NUM_TASKS * (config.rollout.num_train_epochs or 1)
        async with asyncio.timeout(60):
            while not running.done():
                if (await store.count_tasks(split="train")).get(TaskStatus.SETTLED, 0) == wanted:
                    break
                await asyncio.sleep(0.02)
        stop.set()
        await running


async def all_records(store: Store) -> list[Record]:
    return await store.find_records(await store.list_record_ids())


async def rollouts(store: Store) -> list[Any]:
    """Everything a rollout consists of but times and which process did it."""
    found = []
    for record in await all_records(store):
        turns = [
            (
                turn.tokens,
                turn.model.response["text"],
                [(made.request, made.status, made.response["content"], made.error) for made in turn.tools],
            )
            for turn in await store.load_turns(record)
        ]
        found.append((record.id, record.status, record.stop_reason, record.answer, record.score, turns))
    return found


async def split_logprobs(store: Store) -> tuple[list[Any], list[float]]:
    """`rollouts` without log-probs, and those."""
    logprobs: list[float] = []
    found = []
    for *record, turns in await rollouts(store):
        logprobs += [value for tokens, _, _ in turns for value in tokens.logprobs]
        found.append((*record, [(replace(tokens, logprobs=()), text, calls) for tokens, text, calls in turns]))
    return found, logprobs


async def origins(store: Store, *, epoch: int) -> list[str]:
    return [
        str(made.response.get("origin", "live"))
        for record in await all_records(store)
        if record.id.startswith(f"train:{epoch}:")
        for turn in await store.load_turns(record)
        for made in turn.tools
    ]


async def test_the_second_epoch_of_a_fixed_task_set_is_answered_by_the_cache(
    mongo_store: MongoStore, model_dir: Path, tmp_path: Path
) -> None:
    config = make_config(tmp_path, num_epochs=2, tool_journal="cache")
    await sample(mongo_store, config, model_dir)
    first, second = [await origins(mongo_store, epoch=epoch) for epoch in (0, 1)]
    assert len(first) == len(second) == 3 * NUM_TASKS * NUM_GENERATIONS
    assert first.count("live") == 2 * NUM_TASKS + 1  # equal calls of a group, and `pid` of all, once
    assert second.count("cache") / len(second) >= 0.9
    assert (await audit_run(mongo_store, config=config, run_dir=None)).is_clean


async def test_a_strict_replay_gives_the_same_rollouts_bit_for_bit_without_tool_servers(
    mongo_store: MongoStore, mongo_uri: str, database_name: str, model_dir: Path, tmp_path: Path
) -> None:
    await sample(mongo_store, make_config(tmp_path), model_dir)
    journal = tmp_path / "calls.jsonl"
    assert await export_journal(mongo_store, path=journal, run_name="first") == 3 * NUM_TASKS * NUM_GENERATIONS
    children = psutil.Process().children(recursive=True)
    offline = make_config(
        tmp_path, command="no-such-tool-server", tool_journal="replay", tool_journal_file=str(journal)
    )
    replayed = open_store(mongo_uri, database=f"{database_name}_replay")
    await replayed.prepare()
    try:
        await sample(replayed, offline, model_dir)
        assert await rollouts(replayed) == await rollouts(mongo_store)
        assert set(await origins(replayed, epoch=0)) == {"replay"}
        assert (await audit_run(replayed, config=offline, run_dir=None)).is_clean
    finally:
        await replayed.close()
    assert psutil.Process().children(recursive=True) == children


@pytest.mark.parametrize("num_in_flight", [1, 12])
async def test_a_real_engine_samples_the_same_rollouts_again_with_the_tool_servers_switched_off(
    model_dir: Path, tmp_path: Path, num_in_flight: int
) -> None:
    model = write_tool_calling_model(tmp_path / "model")
    first, second = MemoryStore(), MemoryStore()
    args = ["-S", str(SERVER.with_name("bad_tool_server.py")), "good"]
    config = make_config(tmp_path, num_epochs=2, num_in_flight=num_in_flight, args=args, tool_journal="cache")
    async with real_engine(model) as engine:
        await sample(first, config, model, engine=engine)
    found = await origins(first, epoch=1)
    assert found.count("cache") / len(found) >= 0.9
    journal = tmp_path / "calls.jsonl"
    await export_journal(first, path=journal, run_name="first")
    offline = make_config(
        tmp_path, num_epochs=2, num_in_flight=num_in_flight, command="no-such-tool-server",
        tool_journal="replay", tool_journal_file=str(journal),
    )  # fmt: skip
    async with real_engine(model) as engine:
        await sample(second, offline, model, engine=engine)
    assert {*await origins(second, epoch=0), *await origins(second, epoch=1)} == {"replay"}
    if num_in_flight == 1:
        assert await rollouts(second) == await rollouts(first)
        return
    # In other batches a sum may differ in its last bit; what is sampled does not.
    (was, expected), (now, found_again) = [await split_logprobs(store) for store in (first, second)]
    assert now == was
    assert found_again == pytest.approx(expected, abs=1e-6)


async def test_a_call_that_a_strict_replay_does_not_know_ends_the_record_with_a_typed_reason(
    model_dir: Path, tmp_path: Path
) -> None:
    first, second = MemoryStore(), MemoryStore()
    await sample(first, make_config(tmp_path), model_dir)
    journal = tmp_path / "calls.jsonl"
    await export_journal(first, path=journal, run_name="first")

    def ask_for_more(context: str, depth: int) -> str:
        return call("add", a=1000, b=1) if "question 3" in context else add_twice(context, depth)

    offline = make_config(tmp_path, tool_journal="replay", tool_journal_file=str(journal))
    await sample(second, offline, model_dir, script=ask_for_more)
    records = await all_records(second)
    failed = [record for record in records if record.status is RecordStatus.FAILED]
    assert {record.id for record in failed} == {"train:0:q3/g0", "train:0:q3/g1"}
    assert {record.stop_reason for record in failed} == {StopReason.TOOL_ERROR}
    [turn] = await second.load_turns(failed[0])
    assert turn.tools[0].status == "not_recorded"


async def test_a_journal_file_of_one_run_is_the_cache_of_another(model_dir: Path, tmp_path: Path) -> None:
    first, second = MemoryStore(), MemoryStore()
    await sample(first, make_config(tmp_path), model_dir)
    journal = tmp_path / "calls.jsonl"
    await export_journal(first, path=journal, run_name="first")
    await sample(second, make_config(tmp_path, tool_journal="cache", tool_journal_file=str(journal)), model_dir)
    assert set(await origins(second, epoch=0)) == {"cache"}


async def test_a_run_under_injected_faults_ends_every_record_with_a_typed_reason(
    model_dir: Path, tmp_path: Path
) -> None:
    store = MemoryStore()
    faults = {"add": {"crashed": 0.3}, "echo": {"rate_limited": 0.2, "tool_error": 0.3, "slow": 0.2}}
    config = make_config(tmp_path, tool_journal="fault", tool_faults=faults, tool_fault_slow_s=0.01)
    await sample(store, config, model_dir)
    records = await all_records(store)
    assert {record.stop_reason for record in records} == {StopReason.ANSWER, StopReason.TOOL_ERROR}
    assert {"fault", "live"} == set(await origins(store, epoch=0))
    assert all((record.score is None) == (record.stop_reason is StopReason.TOOL_ERROR) for record in records)


async def test_a_journal_file_that_is_cut_off_or_something_else_is_refused_by_line(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    header = json.dumps({"agentrl_tool_journal": 1, "run": "r"})
    for text, message in (
        ("", "empty"),
        (header + '\n{"call": {"record_id"', "line 2: no JSON"),
        (header + '\n{"call": {"record_id": "r/g0"}}', "line 2: no entry"),
        (json.dumps({"agentrl_tool_journal": 2}), "line 1"),
        ('{"agentrl_export": 1}', "line 1"),
    ):
        path.write_text(text)
        with pytest.raises(ArchiveError, match=message):
            load_recorded_calls(path)
    with pytest.raises(UnavailableError, match="agentrl journal"):
        load_recorded_calls(tmp_path / "none.jsonl")


async def test_a_run_that_never_had_tools_has_no_journal(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="no tools"):
        await export_journal(MemoryStore(), path=tmp_path / "calls.jsonl", run_name="r")
