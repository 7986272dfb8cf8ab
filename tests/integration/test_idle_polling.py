"""How often an idle process asks the database: at most once a second, heartbeats included."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pymongo import monitoring
from rich.console import Console

from agentrl import pacing
from agentrl.chat import ChatFormat
from agentrl.cli.launch.live import PlainView, watch
from agentrl.cli.launch.supervisor import Guard, Supervisor
from agentrl.cli.progress import ProgressReader
from agentrl.cli.train import Heartbeat
from agentrl.config import RunConfig
from agentrl.errors import UnavailableError
from agentrl.inference import EngineClient
from agentrl.inference.canary import CanarySettings
from agentrl.inference.registrar import run_registrar
from agentrl.rollout.worker import run_sampler
from agentrl.store import MongoStore, open_store
from agentrl.tools import FunctionToolbox
from agentrl.train.feed import StoreFeed
from agentrl.train.planner import StepPlanner
from agentrl.types import InferenceService, ServiceStatus
from command_counter import CommandCounter
from engine_targets import embedded_target
from factories import make_task
from scripted_engine import ScriptedEngine
from tiny_chat import write_tiny_chat

pytestmark = pytest.mark.timeout(120)

SETTLE_S = 4.0  # until the pauses have grown to their full length, with QUIET_SHARE
QUIET_SHARE = 10.0  # a real process is as quiet after a minute and a half
WINDOW_S = 8.0
MOST_COMMANDS = int(WINDOW_S) + 3  # those of a look that fell due as the window opened


class Idle:
    """Opens counted stores, each on a database of its own."""

    def __init__(self, uri: str, prefix: str, exits: AsyncExitStack) -> None:
        self.uri, self.prefix, self.exits = uri, prefix, exits
        self.counters: dict[str, CommandCounter] = {}

    def name(self, role: str) -> str:
        """The role's database, counted from now on."""
        name = f"{self.prefix}_{role}"
        self.counters[role] = CommandCounter(name)
        monitoring.register(self.counters[role])
        return name

    async def store(self, role: str) -> MongoStore:
        """A prepared store of the role's database."""
        store = open_store(self.uri, database=self.name(role))
        await store.prepare()
        self.exits.push_async_callback(store.close)
        return store

    def run(self, coroutine: Coroutine[Any, Any, Any], *, role: str) -> None:
        """Keep the process's loop going until the test ends."""
        task = asyncio.create_task(coroutine, name=role)

        async def end() -> None:
            task.cancel()
            await asyncio.wait([task], timeout=20)

        self.exits.push_async_callback(end)


async def start_sampler(idle: Idle, *, role: str, model_dir: Path, num_tasks: int, is_served: bool) -> None:
    store = await idle.store(role)
    await store.insert_tasks([make_task(f"q{number}") for number in range(num_tasks)])
    if is_served:
        service = InferenceService(id="s", base_url="http://s", status=ServiceStatus.UP, policy_version=0)
        await store.put_service(service)
    engine = ScriptedEngine(model_dir, lambda context, depth: "")
    stop = asyncio.Event()
    idle.exits.callback(stop.set)
    chat = ChatFormat.load(model_dir)
    running = run_sampler(RunConfig(), store=store, toolbox=FunctionToolbox([]), client=engine, chat=chat, stop=stop)
    idle.run(running, role=role)


async def start_registrar(idle: Idle, *, base_url: str) -> None:
    store = await idle.store("registrar")
    client = await idle.exits.enter_async_context(EngineClient(base_url, timeout_s=2.0))
    config = RunConfig()
    running = run_registrar(
        client, store, service_id="s", engine="embedded", poll_s=config.inference.policy_poll_s,
        heartbeat_s=config.store.heartbeat_s, canary=CanarySettings(), stop=asyncio.Event(),
    )  # fmt: skip
    idle.run(running, role="registrar")


async def start_trainer(idle: Idle) -> None:
    """A planner that waits for groups on its own thread, and the trainer's heartbeat."""
    name = idle.name("trainer")
    store_settings = RunConfig().store.model_copy(update={"db_connection_string": idle.uri})
    run_settings = RunConfig().run.model_copy(update={"run_name": name})
    config = RunConfig().model_copy(update={"store": store_settings, "run": run_settings})
    config = config.model_copy(
        update={"train": config.train.model_copy(update={"data_timeout_s": SETTLE_S + WINDOW_S})}
    )

    async def open_train_store() -> MongoStore:
        store = open_store(idle.uri, database=name)
        await store.prepare()
        return store

    def wait_for_groups() -> None:
        with StoreFeed(open_train_store, timeout_s=30) as feed, contextlib.suppress(UnavailableError):
            StepPlanner(feed, config=config, num_ranks=1, report=lambda phase, step: None).plan(1)

    heartbeat = Heartbeat(config)
    heartbeat.start()
    idle.run(asyncio.to_thread(wait_for_groups), role="trainer")


async def start_launcher(idle: Idle) -> None:
    store = await idle.store("launcher")
    await store.insert_tasks([make_task(f"q{number}") for number in range(300)])
    reader = ProgressReader(store=store, config=RunConfig(), forget_after=timedelta(seconds=30))
    view = PlainView(Console(file=io.StringIO()))
    idle.run(watch(Supervisor(guard=Guard(lock_descriptors=())), reader=reader, view=view), role="launcher")


async def test_an_idle_process_of_any_kind_sends_at_most_one_command_a_second(
    mongo_uri: str, database_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "_QUIET_SHARE", QUIET_SHARE)
    model_dir = write_tiny_chat(tmp_path / "chat")
    with embedded_target(tmp_path / "engine", kind="qwen3") as target:
        async with AsyncExitStack() as exits:
            clock = CommandCounter("admin")
            monitoring.register(clock)
            idle = Idle(mongo_uri, database_name, exits)
            sampler = {"idle": idle, "model_dir": model_dir}
            await start_sampler(**sampler, role="sampler_without_engine", num_tasks=300, is_served=False)
            await start_sampler(**sampler, role="sampler_without_tasks", num_tasks=0, is_served=True)
            await start_registrar(idle, base_url=target.base_url)
            await start_trainer(idle)
            await start_launcher(idle)
            await asyncio.sleep(SETTLE_S)
            for counter in (clock, *idle.counters.values()):
                counter.reset()
            await asyncio.sleep(WINDOW_S)
            sent = {role: list(counter.names) for role, counter in idle.counters.items()}
    assert all(sent.values()), f"every process lives: {sent}"
    assert {role: names for role, names in sent.items() if len(names) > MOST_COMMANDS} == {}
    assert len(clock.names) <= len(sent), "the server's clock is asked twice a minute"
