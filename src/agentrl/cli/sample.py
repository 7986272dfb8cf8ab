"""`agentrl sample RUN_NAME`, or `--fleet_name FLEET`: one sampler process. Starts without torch."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from agentrl.chat import ChatFormat
from agentrl.cli.agents import Agents, browser_of, open_agents
from agentrl.cli.calls import open_calls
from agentrl.cli.connect import open_run_store
from agentrl.cli.fleet_connect import member_config, open_fleet
from agentrl.cli.invocation import Invocation
from agentrl.cli.service import run_service
from agentrl.config import RunConfig
from agentrl.errors import BudgetSpentError, ConfigError
from agentrl.fleets import FleetRun
from agentrl.inference import RoutedClient
from agentrl.pacing import longest_silence_s
from agentrl.protocols import GenerationClient, Store, Toolbox
from agentrl.rollout.browse import Browser
from agentrl.rollout.custom import sampler_of
from agentrl.rollout.fleet import run_fleet_sampler
from agentrl.rollout.parts import RunParts
from agentrl.rollout.stopping import tell_budget_spent
from agentrl.rollout.tool_calls import ToolCaller
from agentrl.rollout.worker import sample_run
from agentrl.scoring import load_scorers


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutParts:
    """What every rollout process works with."""

    store: Store
    toolbox: Toolbox
    client: GenerationClient
    chat: ChatFormat
    agents: Agents
    caller: ToolCaller
    browser: Browser | None


@asynccontextmanager
async def open_rollout_parts(
    config: RunConfig, *, outlasts_until: asyncio.Event | None = None
) -> AsyncIterator[RolloutParts]:
    """Store, tools, engines and chat format of a run; all closed at the end. `outlasts_until`: see `prepared_store`."""
    if config.model.model_name_or_path is None:
        raise ConfigError("model_name_or_path is not set: give the folder of the policy model with its tokenizer")
    chat = ChatFormat.load(
        config.model.model_name_or_path,
        chat_template=config.model.chat_template,
        tool_call_parser=config.rollout.tool_call_parser,
    )
    async with open_run_store(config, outlasts_until=outlasts_until) as store, open_calls(config, store=store) as calls:
        client = RoutedClient(
            store,
            run_name=config.run.run_name,
            vocab_size=chat.vocab_size,
            heartbeat_timeout_s=longest_silence_s(config.store.heartbeat_s),
        )
        try:
            async with open_agents(config, store) as agents:
                yield RolloutParts(
                    store=store, toolbox=calls.toolbox, client=calls.paying(client), chat=chat, agents=agents,
                    caller=calls.caller, browser=browser_of(agents, chat=chat),
                )  # fmt: skip
        finally:
            await client.close()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run."""
    parser.add_argument("run_name", metavar="RUN_NAME", nargs="?")


def run(invocation: Invocation) -> int:
    """Sample until SIGTERM or Ctrl-C."""
    config = invocation.config
    if config.run.fleet_name is not None:
        return _run_fleet(config)
    if config.rollout.scorer_module is not None:
        load_scorers(config.rollout.scorer_module)

    sampler_class = sampler_of(config)

    async def body(stop: asyncio.Event) -> None:
        async with (
            _trainer_told(config, outlasts_until=stop),
            open_rollout_parts(config, outlasts_until=stop) as parts,
        ):
            run_parts = RunParts(
                config=config, store=parts.store, toolbox=parts.toolbox, client=parts.client, chat=parts.chat,
                scoring=parts.agents.scoring, sampler_class=sampler_class, caller=parts.caller, browser=parts.browser,
            )  # fmt: skip
            await sample_run(run_parts, stop=stop)

    return run_service(config, process_name="sampler", body=body)


@asynccontextmanager
async def _trainer_told(config: RunConfig, *, outlasts_until: asyncio.Event) -> AsyncIterator[None]:
    """Around a sampler's work: if it ends because the budget is spent, the run's trainer is told."""
    try:
        yield
    except BudgetSpentError as refusal:
        async with open_run_store(config, outlasts_until=outlasts_until) as store:
            await tell_budget_spent(store, refusal, heartbeat_s=config.store.heartbeat_s)
        raise


def _run_fleet(config: RunConfig) -> int:
    """Sample for the runs of a fleet until SIGTERM or Ctrl-C."""

    async def body(stop: asyncio.Event) -> None:
        @asynccontextmanager
        async def open_run(run: FleetRun) -> AsyncIterator[RunParts]:
            of_run = member_config(run, process=config)
            if of_run.rollout.scorer_module is not None:
                load_scorers(of_run.rollout.scorer_module)
            async with (
                _trainer_told(of_run, outlasts_until=stop),
                open_rollout_parts(of_run, outlasts_until=stop) as parts,
            ):
                yield RunParts(
                    config=of_run, store=parts.store, toolbox=parts.toolbox, client=parts.client, chat=parts.chat,
                    scoring=parts.agents.scoring, sampler_class=sampler_of(of_run),
                    caller=parts.caller, browser=parts.browser,
                )  # fmt: skip

        async with open_fleet(config, outlasts_until=stop) as fleet:
            max_records = config.rollout.max_concurrent_samples_per_process
            await run_fleet_sampler(fleet, open_run=open_run, max_records=max_records, stop=stop)

    return run_service(config, process_name="sampler", body=body)
