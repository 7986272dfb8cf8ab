"""`agentrl sample RUN_NAME`: one sampler process. Starts without torch."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from agentrl.chat import ChatFormat
from agentrl.cli.connect import open_run_store
from agentrl.cli.invocation import Invocation
from agentrl.cli.service import run_service
from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.inference import RoutedClient
from agentrl.protocols import GenerationClient, Store, Toolbox
from agentrl.rollout.worker import run_sampler
from agentrl.scoring import load_scorers
from agentrl.tools import open_toolbox

HEARTBEAT_TIMEOUT_S = 15.0
MISSED_HEARTBEATS = 3  # a service that is silent for so many is left alone


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutParts:
    """What every rollout process works with."""

    store: Store
    toolbox: Toolbox
    client: GenerationClient
    chat: ChatFormat


@asynccontextmanager
async def open_rollout_parts(
    config: RunConfig, *, outlasts_until: asyncio.Event | None = None
) -> AsyncIterator[RolloutParts]:
    """Store, tools, engines and chat format of a run; all closed at the end. `outlasts_until`: see `prepared_store`."""
    if config.model.model_name_or_path is None:
        raise ConfigError("model_name_or_path is not set: give the folder of the policy model with its tokenizer")
    chat = ChatFormat.load(config.model.model_name_or_path, chat_template=config.model.chat_template)
    async with open_run_store(config, outlasts_until=outlasts_until) as store:
        toolbox = await open_toolbox(config.tools)
        client = RoutedClient(
            store,
            vocab_size=chat.vocab_size,
            heartbeat_timeout_s=max(HEARTBEAT_TIMEOUT_S, MISSED_HEARTBEATS * config.store.heartbeat_s),
        )
        try:
            yield RolloutParts(store=store, toolbox=toolbox, client=client, chat=chat)
        finally:
            await client.close()
            await toolbox.close()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run."""
    parser.add_argument("run_name", metavar="RUN_NAME", nargs="?")


def run(invocation: Invocation) -> int:
    """Sample until SIGTERM or Ctrl-C."""
    config = invocation.config
    if config.rollout.scorer_module is not None:
        load_scorers(config.rollout.scorer_module)

    async def body(stop: asyncio.Event) -> None:
        async with open_rollout_parts(config, outlasts_until=stop) as parts:
            await run_sampler(
                config, store=parts.store, toolbox=parts.toolbox, client=parts.client, chat=parts.chat, stop=stop
            )

    return run_service(config, process_name="sampler", body=body)
