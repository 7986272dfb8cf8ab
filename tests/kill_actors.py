"""The processes that the kill campaign kills: `kill_actors.py ROLE SPEC.json NAME [ARGUMENT ...]`.

    sampler    the product's worker, store, router and agent; one Python function as tool
    engine     SGLang's HTTP API with a scripted model behind it, kept up to date by the product's registrar
    trainer    the product's planner, feed and ledger around a model whose weights are the list of what it trained
    agentrl    the command itself, with these arguments

Each ends with the process that started it: its standard input is a pipe that closes then.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web
from pymongo import monitoring

from agentrl.chat import ChatFormat
from agentrl.config import RunConfig
from agentrl.inference import EngineClient, RoutedClient
from agentrl.inference.canary import CanarySettings
from agentrl.inference.registrar import run_registrar
from agentrl.protocols import TrainStore
from agentrl.rollout.worker import run_sampler
from agentrl.store import MongoStore
from agentrl.store.connection import Database
from agentrl.tools import FunctionToolbox
from agentrl.train.feed import StoreFeed
from agentrl.types import GenerateReply, GenerateRequest, PolicyVersion, Record, Recovery, StepStatus, Turn
from kill_engine import GENERATION_S, ScriptedServer
from kill_points import KillPoints

if TYPE_CHECKING:
    from agentrl.train.planner import StepPlanner

TOOL_S = (0.01, 0.05)
OPTIMIZER_S = (0.1, 0.3)
POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What a process is told."""

    config: RunConfig
    uri: str
    folder: Path
    model_dir: Path
    name: str
    points: KillPoints

    @property
    def database(self) -> Database:
        """The run's database."""
        return Database(self.uri, name=self.config.run.run_name, timeout_s=self.config.store.db_timeout_s)


# --- sampler ----------------------------------------------------------------------------------------------------------


class WitnessedStore(MongoStore):
    """Notes every turn whose commit was acknowledged, in a file that outlives the process."""

    def __init__(self, database: Database, *, witness: Path) -> None:
        super().__init__(database, rng=random.Random())
        self._witness = witness.open("ab", buffering=0)

    async def commit_turn(self, record: Record, turn: Turn) -> Record:
        """The real commit."""
        extended = await super().commit_turn(record, turn)
        tokens = turn.tokens
        line = {
            "turn_id": turn.model.id,
            "record_id": record.id,
            "index": turn.index,
            "prompt_ids": list(tokens.prompt_ids),
            "completion_ids": list(tokens.completion_ids),
            "logprobs": list(tokens.logprobs),
            "tools": [call.response["content"] for call in turn.tools],
        }
        self._witness.write(json.dumps(line).encode() + b"\n")
        return extended


class WatchedClient:
    """A GenerationClient that tells when a generation is under way."""

    def __init__(self, client: RoutedClient, points: KillPoints) -> None:
        self._client = client
        self._points = points

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """The real request."""
        timer = asyncio.get_running_loop().call_later(GENERATION_S[0] / 2, self._points.reach, "in generation")
        try:
            return await self._client.generate(request)
        finally:
            timer.cancel()

    async def close(self) -> None:
        """Close the real client."""
        await self._client.close()


async def sample(spec: Spec) -> None:
    """One sampler process, until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    rng = random.Random()

    async def add(a: int, b: int) -> str:
        """Sum of two integers."""
        spec.points.reach("in tool")
        await asyncio.sleep(rng.uniform(*TOOL_S))
        return str(a + b)

    store = WitnessedStore(spec.database, witness=spec.folder / f"{spec.name}.{os.getpid()}.turns")
    await store.prepare()
    chat = ChatFormat.load(spec.model_dir)
    client = WatchedClient(RoutedClient(store, vocab_size=chat.vocab_size), spec.points)
    toolbox = FunctionToolbox([add], recovery=Recovery.STATELESS)
    try:
        await run_sampler(spec.config, store=store, toolbox=toolbox, client=client, chat=chat, stop=stop)
    finally:
        await client.close()
        await store.close()


# --- engine -----------------------------------------------------------------------------------------------------------


async def serve(spec: Spec) -> None:
    """One engine and its registrar, until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    runner = web.AppRunner(ScriptedServer(spec.model_dir, points=spec.points).application(), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert runner.addresses
    port = runner.addresses[0][1]
    store = MongoStore(spec.database, rng=random.Random())
    await store.prepare()
    async with EngineClient(f"http://127.0.0.1:{port}") as client:
        await run_registrar(
            client,
            store,
            service_id=f"scripted-{os.getpid()}-{port}",
            engine="scripted",
            poll_s=POLL_S,
            heartbeat_s=spec.config.store.heartbeat_s,
            canary=CanarySettings(interval_s=1.0, timeout_s=5.0),
            stop=stop,
        )
    await store.close()
    await runner.cleanup()


# --- trainer ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class ListTrainer:
    """The order of `agentrl.train.loop`: plan, train, checkpoint, publish, commit; resumed as that resumes."""

    spec: Spec
    feed: StoreFeed
    planner: StepPlanner
    trained: list[list[Any]]  # [step, [row id, ...]]: the weights
    rng: random.Random

    def finish_interrupted_step(self) -> int:
        """Publish and commit what the checkpoint holds; the next step."""
        step = self.trained[-1][0] if self.trained else 0
        self._publish(step)
        if step:
            entry = self.feed.call(lambda store: store.get_step(step))
            assert entry is not None, f"the checkpoint's step {step} has no plan"
            if entry.status is not StepStatus.COMMITTED:
                self._commit(step)
        return int(step) + 1

    def train(self, step: int) -> None:
        """One step."""
        plan = self.planner.plan(step)
        time.sleep(self.rng.uniform(*OPTIMIZER_S))
        self.spec.points.reach("step trained")
        self.trained.append([step, list(plan.entry.sequence_ids)])
        checkpoint = checkpoint_file(self.spec)
        unfinished = checkpoint.with_suffix(".tmp")
        unfinished.write_text(json.dumps(self.trained))
        self.spec.points.reach("in checkpoint")
        unfinished.rename(checkpoint)
        self.spec.points.reach("after checkpoint")
        self._publish(step)
        self._commit(step)

    def _publish(self, step: int) -> None:
        version = PolicyVersion(version=step, path=f"v{step}")
        latest = self.feed.call(lambda store: store.latest_policy())
        if latest is None or latest.version < step:
            self.feed.call(lambda store: store.publish_policy(version))

    def _commit(self, step: int) -> None:
        entry = self.feed.call(lambda store: store.get_step(step))
        assert entry is not None
        rows = [row.summary for row in self.feed.call(lambda store: store.load_sequences(entry.sequence_ids))]
        totals = {
            "num_trained_tokens": float(sum(row.num_trained_tokens for row in rows)),
            "num_tokens": float(sum(row.num_tokens for row in rows)),
            "num_sequences": float(len(rows)),
        }
        done = replace(entry, status=StepStatus.COMMITTED, metrics={**entry.metrics, **totals})
        self.feed.call(lambda store: store.commit_step(done))


def checkpoint_file(spec: Spec) -> Path:
    """Where the trainer keeps its weights."""
    return spec.folder / "checkpoint.json"


def train(spec: Spec) -> None:
    """The trainer process, until it is killed."""
    from agentrl.train.planner import StepPlanner  # loads torch, which the others can do without

    async def open_store() -> TrainStore:
        store = MongoStore(spec.database, rng=random.Random())
        await store.prepare()
        return store

    checkpoint = checkpoint_file(spec)
    trained = json.loads(checkpoint.read_text()) if checkpoint.exists() else []
    with StoreFeed(open_store, timeout_s=6 * spec.config.store.db_timeout_s) as feed:
        planner = StepPlanner(feed, config=spec.config, num_ranks=1, report=lambda phase, step: None)
        trainer = ListTrainer(spec=spec, feed=feed, planner=planner, trained=trained, rng=random.Random())
        step = trainer.finish_interrupted_step()
        (spec.folder / f"{spec.name}.{os.getpid()}.ready").write_text(datetime.now(UTC).isoformat())
        while True:
            trainer.train(step)
            step += 1


# --- the command ------------------------------------------------------------------------------------------------------

PHASES = {"checkpoint": "step trained", "publish": "after checkpoint"}
"""What the trainer reports before it begins a phase -> the instant that is."""


def run_command(spec: Spec, arguments: Sequence[str]) -> int:
    """`agentrl ARGUMENT ...` in the run's folder."""
    from agentrl.cli.main import main as agentrl
    from agentrl.cli.train import Heartbeat

    told = Heartbeat.report

    def report(self: Heartbeat, phase: str, step: int) -> None:
        spec.points.reach(PHASES.get(phase, phase))
        told(self, phase, step)

    Heartbeat.report = report  # type: ignore[method-assign]
    os.chdir(spec.folder)
    return agentrl(arguments)


# --- process ----------------------------------------------------------------------------------------------------------


def end_with_the_parent() -> None:
    """Standard input closes when the campaign ends, however it ends."""

    def wait() -> None:
        os.read(sys.stdin.fileno(), 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def main(role: str, spec_path: str, name: str, *arguments: str) -> int:
    """Run one role."""
    end_with_the_parent()
    told = json.loads(Path(spec_path).read_text())
    folder = Path(told["folder"])
    points = KillPoints(folder, name=name)
    monitoring.register(points)
    spec = Spec(
        config=RunConfig.model_validate(told["config"]),
        uri=told["uri"],
        folder=folder,
        model_dir=Path(told["model_dir"]),
        name=name,
        points=points,
    )
    if role == "agentrl":
        return run_command(spec, arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    if role == "trainer":
        train(spec)
    else:
        asyncio.run(sample(spec) if role == "sampler" else serve(spec))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
