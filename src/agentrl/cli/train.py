"""`agentrl train RUN_NAME`: one trainer process; `accelerate launch` runs it on every rank."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
import sys
import threading
from collections.abc import Sequence
from datetime import UTC, datetime

from rich.console import Console

from agentrl.cli.connect import prepared_store
from agentrl.cli.exit_codes import EXIT_STOPPED
from agentrl.cli.fresh import add_fresh_arguments, check_fresh_arguments, start_over
from agentrl.cli.invocation import Invocation
from agentrl.cli.pulse import beat_from_thread
from agentrl.config import RunConfig
from agentrl.config.sections import LossConfig
from agentrl.errors import StoreError, UnavailableError
from agentrl.protocols import MetricSink, ReadStore, TrainStore
from agentrl.store import MongoStore
from agentrl.telemetry import JsonlSink, setup_logging
from agentrl.types import Worker

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run, and whether it starts over."""
    parser.add_argument("run_name", metavar="RUN_NAME", nargs="?")
    add_fresh_arguments(parser)


def run(invocation: Invocation) -> int:
    """Train until max_steps."""
    beat_from_thread()
    from agentrl.train.loop import train

    config = invocation.config
    check_fresh_arguments(invocation.arguments)
    if invocation.arguments.fresh:
        asyncio.run(start_over(config, force=invocation.arguments.force, console=Console(stderr=True, markup=False)))
    setup_logging("train", log_dir=config.run.log_dir, run_name=config.run.run_name, is_verbose=sys.stderr.isatty())
    heartbeat = Heartbeat(config)
    if os.environ.get("RANK", "0") == "0":
        if config.loss.loss_module is not None:
            asyncio.run(_record_loss_module(config))
        heartbeat.start()

    async def open_train_store() -> TrainStore:
        # Never set: a signal ends the trainer at once, and the next start resumes.
        return await prepared_store(config, outlasts_until=asyncio.Event())

    def open_sinks() -> Sequence[MetricSink]:
        return [JsonlSink(config.run.run_dir / "metrics.jsonl")]

    alarms = train(config, open_store=open_train_store, sinks=open_sinks, report=heartbeat.report)
    if not alarms:
        return 0
    logger.warning("ended by %s: start again to go on", ", ".join(alarm.name for alarm in alarms))
    is_rank = "WORLD_SIZE" in os.environ
    return 0 if is_rank else EXIT_STOPPED  # a launcher of ranks would take it for a failure of one


async def _record_loss_module(config: RunConfig) -> None:
    store = await prepared_store(config)
    try:
        await record_loss_module(store, loss=config.loss)
    finally:
        await store.close()


async def record_loss_module(store: ReadStore, *, loss: LossConfig) -> None:
    """Write into the Run document which file the loss comes from; say if the run was made with another content.

    Raises ConfigError, and records nothing, if the file defines no such loss.
    """
    from agentrl.algo.losses import file_sha256, policy_term

    if loss.loss_module is None:
        return
    policy_term(loss)
    used = {"path": str(loss.loss_module.resolve()), "sha256": file_sha256(loss.loss_module)}
    known = (await store.get_run() or {}).get("loss_module")
    if known is not None and known["sha256"] != used["sha256"]:
        logger.warning("loss_module = %s: its content changed since the run's last start", loss.loss_module)
    await store.put_run({"loss_module": used})


class Heartbeat(threading.Thread):
    """Tells the store every `heartbeat_s` that the trainer lives and what it does, also while it computes."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._config = config
        self._phase = "start"
        self._started_at = datetime.now(UTC)

    def report(self, phase: str, step: int) -> None:
        """What the trainer does from now on."""
        self._phase = f"step {step}, {phase}"

    def run(self) -> None:
        """Beat until the process ends."""
        asyncio.run(self._beat())

    async def _beat(self) -> None:
        store: MongoStore | None = None
        while True:
            try:
                store = store or await prepared_store(self._config)
                await store.put_worker(self._describe())
            except (StoreError, UnavailableError) as error:  # the database is away: the next beat tries again
                logger.warning("heartbeat: %s", error)
            await asyncio.sleep(self._config.store.heartbeat_s)

    def _describe(self) -> Worker:
        host, pid = socket.gethostname(), os.getpid()
        return Worker(
            id=f"trainer-{host}-{pid}",
            kind="trainer",
            host=host,
            pid=pid,
            phase=self._phase,
            started_at=self._started_at,
        )
