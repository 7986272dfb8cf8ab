"""A database that is away longer than db_timeout_s: sampler, trainer and registrar wait for it and go on."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

import trainer_process
from agentrl.chat import ChatFormat
from agentrl.cli.connect import prepared_store
from agentrl.config import AlgoConfig, InferenceConfig, RolloutConfig, RunConfig, StoreConfig
from agentrl.errors import DatabaseUnavailableError, StoreError
from agentrl.inspector.audit import audit_run
from agentrl.protocols import TrainStore
from agentrl.rollout.worker import run_sampler
from agentrl.store import MongoStore, open_store
from agentrl.store.embedded import embedded_uri
from agentrl.tools import FunctionToolbox
from agentrl.train.loop import train
from agentrl.types import (
    InferenceService,
    PolicyVersion,
    RecordStatus,
    Recovery,
    ServiceStatus,
    StepStatus,
    Task,
    TaskStatus,
)
from crashing_server import CrashingServer
from engine_targets import EngineTarget, embedded_target
from factories import make_task, make_turn
from registered_engine import registered
from scripted_engine import ScriptedEngine
from tiny_chat import write_tiny_chat
from tiny_model import random_row, run_config, write_tiny_model

TIMEOUT_S = 0.8  # db_timeout_s
OUTAGE_S = 3 * TIMEOUT_S
DEADLINE_S = 60.0
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
NUM_TASKS = 4


def add(a: int, b: int) -> str:
    """Sum of two integers."""
    return str(a + b)


def has_result(context: str) -> bool:
    """Whether the tool has answered."""
    return "<tool_response>" in context


@asynccontextmanager
async def patient_store(crashing: CrashingServer, *, stop: asyncio.Event | None = None) -> AsyncIterator[MongoStore]:
    """A store as the processes of a run have it: db_timeout_s is short, outages are outlasted."""
    store = open_store(crashing.server.uri, database="run", timeout_s=TIMEOUT_S)
    await store.prepare()
    store.outlast_outages(stop or asyncio.Event())
    try:
        yield store
    finally:
        await store.close()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Poll with a bound."""
    async with asyncio.timeout(DEADLINE_S):
        while not await condition():
            await asyncio.sleep(0.02)


async def outage(crashing: CrashingServer) -> None:
    """Several times db_timeout_s without a database."""
    await crashing.stay_away(OUTAGE_S)


# --- the store ------------------------------------------------------------------------------------------------------


async def test_an_operation_waits_for_the_database_and_the_log_says_so_once(
    crashing: CrashingServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with asyncio.timeout(DEADLINE_S), patient_store(crashing) as store:
        await store.insert_tasks([make_task(num_generations=8)])
        (claim,) = await store.claim_tasks(split="train", owner="w", lease_s=3600, limit=1)
        records = await store.open_records(claim)
        gone = asyncio.create_task(outage(crashing))
        extended = await asyncio.gather(*(store.commit_turn(record, make_turn(record)) for record in records))
        await gone
        assert [await store.get_record(record.id) for record in records] == extended
    said = [entry.getMessage() for entry in caplog.records if entry.name == "agentrl.store.outage"]
    assert len(said) == 2
    assert "does not answer: waiting for it" in said[0]
    assert str(crashing.port) in said[0]
    assert "answers again after" in said[1]


async def test_a_server_that_answers_everything_but_one_operation_is_not_waited_for(crashing: CrashingServer) -> None:
    async with asyncio.timeout(DEADLINE_S), patient_store(crashing) as store:
        with pytest.raises(StoreError, match="hang in run"):
            await store._database.run("hang", asyncio.Event().wait)


@pytest.mark.parametrize("outlasts", [True, False])
async def test_a_database_that_is_unreachable_at_the_start_is_an_immediate_error(
    free_port: int, outlasts: bool
) -> None:
    store = StoreConfig(db_connection_string=embedded_uri(free_port), db_timeout_s=TIMEOUT_S)
    started = time.monotonic()
    with pytest.raises(DatabaseUnavailableError, match="start one with `agentrl db`"):
        await prepared_store(RunConfig(store=store), outlasts_until=asyncio.Event() if outlasts else None)
    assert time.monotonic() - started < 10 * TIMEOUT_S + 5


# --- the sampler ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat(tmp_path_factory.mktemp("chat"))


def sampler_config(*, lease_s: float) -> RunConfig:
    return RunConfig(
        store=StoreConfig(heartbeat_s=0.05, lease_s=lease_s, db_timeout_s=TIMEOUT_S),
        rollout=RolloutConfig(num_generations=2, max_new_tokens=200, max_prompt_tokens=2000, num_train_epochs=1),
        inference=InferenceConfig(context_length=4000),
        algo=AlgoConfig(tasks_per_step=NUM_TASKS, max_staleness=0, advantage="none", drop_zero_advantage=False),
    )  # fmt: skip


class Sampler:
    """A running sampler with its own connection; its engine answers a second turn only once `released`."""

    def __init__(self, model_dir: Path, store: MongoStore, *, config: RunConfig, stop: asyncio.Event) -> None:
        self.released = asyncio.Event()
        self.engine = ScriptedEngine(model_dir, lambda context, depth: "<answer>5</answer>")
        self.stop = stop
        self.running = asyncio.create_task(
            run_sampler(
                config,
                store=store,
                toolbox=FunctionToolbox([add], recovery=Recovery.STATELESS),
                client=self,
                chat=ChatFormat.load(model_dir),
                stop=stop,
            )
        )

    async def generate(self, request):
        self.engine.script = self.script
        context = self.engine.tokenizer.decode(list(request.input_ids), skip_special_tokens=False)
        if has_result(context):
            await self.released.wait()
        return await self.engine.generate(request)

    def script(self, context: str, depth: int) -> str:
        return "<answer>5</answer>" if has_result(context) else CALL

    async def close(self) -> None:
        """Nothing to release."""


async def put_tasks(store: MongoStore) -> None:
    await store.put_service(
        InferenceService(id="scripted", base_url="http://s", status=ServiceStatus.UP, policy_version=0)
    )
    tasks: list[Task] = [make_task(f"q{number}", answer="5") for number in range(NUM_TASKS)]
    await store.insert_tasks(tasks)


async def all_have_a_turn(store: MongoStore) -> bool:
    records = await store.list_records(split="train")
    return len(records) == 2 * NUM_TASKS and all(record.turn_ids for record in records)


async def all_are_settled(store: MongoStore) -> bool:
    return (await store.count_tasks(split="train")).get(TaskStatus.SETTLED) == NUM_TASKS


async def assert_every_record_was_made_once(store: MongoStore, *, config: RunConfig) -> None:
    records = await store.list_records(split="train", limit=1000)
    assert len({record.id for record in records}) == len(records) == 2 * NUM_TASKS
    assert {(record.status, record.score, len(record.turn_ids)) for record in records} == {
        (RecordStatus.FINISHED, 1.0, 2)
    }
    report = await audit_run(store, config=config, run_dir=None)
    assert report.found == frozenset()


async def test_a_sampler_outlasts_the_outage_and_finishes_its_records_with_the_turns_it_had(
    crashing: CrashingServer, model_dir: Path
) -> None:
    config = sampler_config(lease_s=3600)
    stop = asyncio.Event()
    async with asyncio.timeout(DEADLINE_S), patient_store(crashing, stop=stop) as store:
        await put_tasks(store)
        sampler = Sampler(model_dir, store, config=config, stop=stop)
        await until(lambda: all_have_a_turn(store))
        before = {record.id: record.turn_ids for record in await store.list_records(split="train")}
        gone = asyncio.create_task(outage(crashing))
        sampler.released.set()  # the engine answers while the database is away: the commits wait
        await gone
        await until(lambda: all_are_settled(store))
        after = {record.id: record for record in await store.list_records(split="train")}
        assert all(after[record_id].turn_ids[:1] == turn_ids for record_id, turn_ids in before.items())
        assert {(record.attempt, record.fence) for record in after.values()} == {(1, 1)}
        await assert_every_record_was_made_once(store, config=config)
        stop.set()
        await sampler.running


async def test_samplers_whose_leases_ran_out_meanwhile_obey_the_fence(
    crashing: CrashingServer, model_dir: Path
) -> None:
    config = sampler_config(lease_s=TIMEOUT_S)
    stop = asyncio.Event()
    async with (
        asyncio.timeout(DEADLINE_S),
        patient_store(crashing, stop=stop) as first_store,
        patient_store(crashing, stop=stop) as second_store,
    ):
        await put_tasks(first_store)
        samplers = [Sampler(model_dir, store, config=config, stop=stop) for store in (first_store, second_store)]
        await until(lambda: all_have_a_turn(first_store))
        gone = asyncio.create_task(outage(crashing))
        for sampler in samplers:
            sampler.released.set()
        await gone
        await until(lambda: all_are_settled(first_store))
        await assert_every_record_was_made_once(first_store, config=config)
        stop.set()
        for sampler in samplers:
            await sampler.running


async def test_a_sampler_that_is_to_stop_does_not_wait_for_the_database(
    crashing: CrashingServer, model_dir: Path
) -> None:
    stop = asyncio.Event()
    async with asyncio.timeout(DEADLINE_S), patient_store(crashing, stop=stop) as store:
        await put_tasks(store)
        sampler = Sampler(model_dir, store, config=sampler_config(lease_s=3600), stop=stop)
        await until(lambda: all_have_a_turn(store))
        crashing.server.kill()
        stop.set()
        async with asyncio.timeout(15):
            outcome = (await asyncio.gather(sampler.running, return_exceptions=True))[0]
        assert outcome is None or isinstance(outcome, StoreError)
        await asyncio.to_thread(crashing.start)


# --- the trainer ----------------------------------------------------------------------------------------------------


async def insert_rows(uri: str) -> None:
    store = open_store(uri, database="run")
    await store.prepare()
    rng = np.random.default_rng(3)
    await store.insert_sequences([random_row(f"r{k:02}", rng=rng) for k in range(8)])
    await store.close()


def test_a_trainer_outlasts_the_outage_and_its_ledger_is_whole(crashing: CrashingServer) -> None:
    num_steps = 4
    config = run_config(
        crashing.directory,
        model_dir=write_tiny_model(crashing.directory / "start"),
        rollout={"enable_sampling": False},
        loss={"loss": "CROSS_ENTROPY"},
        train={"max_steps": num_steps, "save_steps": 2, "sft_batch_size": 2, "max_tokens": 64},
        store={"db_timeout_s": TIMEOUT_S},
    )
    asyncio.run(insert_rows(crashing.server.uri))
    restarting = threading.Timer(OUTAGE_S, crashing.start)

    async def open_patient_store() -> TrainStore:
        store = open_store(crashing.server.uri, database="run", timeout_s=5.0)
        await store.prepare()
        store._database.timeout_s = TIMEOUT_S
        store.outlast_outages(asyncio.Event())
        return store

    def report(now: str, step: int) -> None:
        if (now, step) == ("forward_backward", 2):
            crashing.server.kill()
            restarting.start()

    train(config, open_store=open_patient_store, sinks=trainer_process.jsonl_sinks(config), report=report)
    restarting.join()
    assert [(step.step, step.status, step.attempts) for step in asyncio.run(ledger_of(crashing.server.uri))] == [
        (step, StepStatus.COMMITTED, 1) for step in range(1, num_steps + 1)
    ]


async def ledger_of(uri: str):
    store = open_store(uri, database="run")
    steps = await store.list_steps()
    await store.close()
    return steps


# --- the registrar --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineTarget]:
    with embedded_target(tmp_path_factory.mktemp("engine"), kind="qwen3") as target:
        yield target


async def test_a_registrar_outlasts_the_outage_and_follows_the_policy_afterwards(
    crashing: CrashingServer, engine: EngineTarget
) -> None:
    store = open_store(crashing.server.uri, database="run", timeout_s=TIMEOUT_S)  # as `agentrl serve` opens it
    await store.prepare()

    async def is_up_at(version: int) -> bool:
        try:
            services = await store.list_services()
        except StoreError:
            return False
        return [(service.status, service.policy_version) for service in services] == [(ServiceStatus.UP, version)]

    async with registered(engine.base_url, store):
        await until(lambda: is_up_at(0))
        await outage(crashing)
        await store.publish_policy(PolicyVersion(version=1, path=str(engine.model_dirs[1])))
        await until(lambda: is_up_at(1))
    await store.close()
