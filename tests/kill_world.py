"""The processes of a run that is to be killed, and their supervisor: database, samplers, engines, a trainer.

A process that ends is started again at once, as `agentrl launch` does. All are ended by their ids, and only those.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import kill_actors
from agentrl.config import AlgoConfig, InferenceConfig, RolloutConfig, RunConfig, RunSection, StoreConfig
from agentrl.config.load import load_config
from agentrl.store.embedded import EmbeddedServer, start_embedded
from agentrl.types import Task
from kill_plan import REAL, Cast
from tiny_chat import write_tiny_chat

LEASE_S = 2.0
HEARTBEAT_S = 0.5
END_S = 20.0
LOOK_S = 0.02
NUM_ITEMS = 100
NUM_GENERATIONS = 2


@dataclass(slots=True, kw_only=True)
class Actor:
    """One place in the run, and the process that fills it now."""

    role: str
    index: int
    command: list[str]
    log_path: Path
    process: subprocess.Popen[bytes] = field(init=False)

    @property
    def name(self) -> str:
        """sampler_0."""
        return f"{self.role}_{self.index}"

    def start(self) -> None:
        """A new process."""
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    @property
    def has_ended(self) -> bool:
        """Whether it needs a successor."""
        return self.process.poll() is not None

    def send(self, number: signal.Signals) -> None:
        """Signal it, if it lives."""
        if not self.has_ended:
            self.process.send_signal(number)

    def wait(self) -> None:
        """Until it has ended, killed if it takes too long."""
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(END_S)


@dataclass(slots=True, kw_only=True)
class World:
    """One database server with one run on it."""

    folder: Path  # of this run: points, witnesses, checkpoint, logs
    uri: str
    run_name: str
    config: RunConfig
    actors: list[Actor]
    run_dir: Path | None  # with the checkpoints; None: the trainer has a list in place of a model
    restart_database: Callable[[], None]
    database_pid: Callable[[], int]

    def find(self, role: str) -> list[Actor]:
        """Actors of a role."""
        return [actor for actor in self.actors if actor.role == role]

    def revive(self) -> None:
        """Start successors of the processes that have ended."""
        for actor in self.actors:
            if actor.has_ended:
                actor.start()

    def stop(self, role: str) -> None:
        """End all processes of a role in an orderly way."""
        stopped = self.find(role)
        for actor in stopped:
            actor.send(signal.SIGTERM)
        for actor in stopped:
            actor.wait()
            self.actors.remove(actor)


@dataclass(slots=True, kw_only=True)
class DatabaseServer:
    """An embedded server that can be killed by anybody and comes back on its data and port."""

    folder: Path
    port: int
    server: EmbeddedServer = field(init=False)

    def start(self) -> None:
        """Start on new or old data."""
        self.server = start_embedded(self.folder / "data", port=self.port, log_path=self.folder / "database.log")

    def restart(self) -> None:
        """After a kill, as soon as the process is gone and with it its port."""
        assert wait_until(lambda: not self.server.is_running, within_s=END_S), f"process {self.pid} lives on"
        self.start()

    @property
    def pid(self) -> int:
        """Of the process now."""
        return self.server.pid


def run_config(folder: Path, *, run_name: str) -> RunConfig:
    """Short leases; work enough for every sampler at any time."""
    return RunConfig(
        run=RunSection(run_name=run_name, output_dir=folder),
        store=StoreConfig(lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S, db_timeout_s=60.0),
        rollout=RolloutConfig(
            num_generations=NUM_GENERATIONS,
            max_concurrent_samples_per_process=2 * NUM_GENERATIONS,
            max_new_tokens=200,
            max_prompt_tokens=3000,
        ),
        inference=InferenceConfig(context_length=4000, request_timeout_s=30.0),
        algo=AlgoConfig(max_staleness=3, tasks_per_step=2),
    )


@contextmanager
def database_server(folder: Path) -> Iterator[DatabaseServer]:
    """A running server; stopped on the way out."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    database = DatabaseServer(folder=folder, port=port)
    database.start()
    try:
        yield database
    finally:
        database.server.stop()


@contextmanager
def world(database: DatabaseServer, *, run_name: str, cast: Cast) -> Iterator[World]:
    """A run with its processes, on a server that others may share. All of them are killed on the way out."""
    folder = database.folder / run_name
    folder.mkdir()
    is_real = cast is REAL
    config = real_config(folder, uri=database.server.uri) if is_real else run_config(folder, run_name=run_name)
    spec = folder / "spec.json"
    told = {
        "config": config.model_dump(mode="json"),
        "uri": database.server.uri,
        "folder": str(folder),
        "model_dir": str(folder / "model" if is_real else write_tiny_chat(folder / "model")),
    }
    spec.write_text(json.dumps(told))
    made = World(
        folder=folder,
        uri=database.server.uri,
        run_name=run_name,
        config=config,
        actors=[
            make_actor(role, index, spec=spec, arguments=command_of(role, run_name) if is_real else None)
            for role, count in cast.counts.items()
            for index in range(count)
        ],
        run_dir=folder / "output" / run_name if is_real else None,
        restart_database=database.restart,
        database_pid=lambda: database.pid,
    )
    for actor in made.actors:
        actor.start()
    try:
        yield made
    finally:
        for actor in made.actors:
            actor.send(signal.SIGKILL)
        for actor in made.actors:
            actor.wait()


def make_actor(role: str, index: int, *, spec: Path, arguments: Sequence[str] | None) -> Actor:
    """One of the scripted processes, or `agentrl` with arguments."""
    name = f"{role}_{index}"
    started_as = [role, str(spec), name] if arguments is None else ["agentrl", str(spec), name, *arguments]
    command = [sys.executable, kill_actors.__file__, *started_as]
    return Actor(role=role, index=index, command=command, log_path=spec.parent / f"{name}.log")


def command_of(role: str, run_name: str) -> list[str]:
    """How a launch starts this role."""
    command = {"sampler": "sample", "engine": "serve", "trainer": "train"}[role]
    return [command, run_name, "--config", "run.yaml"]


def real_config(folder: Path, *, uri: str) -> RunConfig:
    """A tiny model and its settings in the folder, as `run.yaml` there."""
    from launched_run import write_run  # loads torch

    write_run(
        folder,
        db_connection_string=uri,
        lease_s=LEASE_S,
        heartbeat_s=HEARTBEAT_S,
        db_timeout_s=60,
        num_generations=NUM_GENERATIONS,
        max_concurrent_samples_per_process=2 * NUM_GENERATIONS,
        max_staleness=3,
        max_steps=10_000,
        save_total_limit=3,
    )
    return load_config(profile=None, config_file=folder / "run.yaml", environ={}, argv_flags=[])


def make_tasks() -> list[Task]:
    """The items of epoch 0."""
    return [
        Task(
            id=f"train:0:q{index}",
            item_id=f"q{index}",
            split="train",
            epoch=0,
            query=f"{index}: what is 2 + 3?",
            answer="5",
            scorer="em",
            num_generations=NUM_GENERATIONS,
        )
        for index in range(NUM_ITEMS)
    ]


def wait_until(condition: Callable[[], bool], *, within_s: float) -> bool:
    """Whether it came true in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_S)
    return True
