"""The browse agent of `agent_config_path` in whole runs: real HTTP, failover, outage, its calls in the ledger."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl.chat import ChatFormat
from agentrl.cli.agents import browser_of, open_agents
from agentrl.cli.calls import read_spending
from agentrl.config import RunConfig
from agentrl.inspector.audit import audit_run
from agentrl.inspector.costs import load_costs
from agentrl.rollout.parts import RunParts
from agentrl.rollout.spending import PaidClient
from agentrl.rollout.tool_calls import LiveCaller
from agentrl.rollout.worker import sample_run
from agentrl.store import MemoryStore
from agentrl.tools import FunctionToolbox
from agentrl.types import (
    DispatchedSamplingTask,
    DispatchKind,
    InferenceService,
    Record,
    RecordStatus,
    Recovery,
    ServiceStatus,
    StopReason,
    TaskStatus,
    Turn,
)
from chat_server import Fault, Status, chat_server
from factories import make_task
from scripted_engine import ScriptedEngine
from tiny_chat import write_tiny_chat

PAGE = "The bridge was built in 1903. " + "Nobody asked for this sentence. " * 30
SUMMARY = "Built in 1903."
CALL = '<tool_call>{"name": "fetch", "arguments": {"url": "http://a.org", "purpose": "the year"}}</tool_call>'
SERVICE = InferenceService(id="scripted", base_url="http://scripted", status=ServiceStatus.UP, policy_version=0)
BROWSE_COST = 1_000_000 + 11 * 1000 + 3 * 2000  # of one reply of the chat server: 11 tokens in, 3 out


def fetch(url: str, purpose: str = "") -> str:
    """Read a page."""
    return PAGE


def read_once(context: str, depth: int) -> str:
    return "<answer>1903</answer>" if "<tool_response>" in context else CALL


def read_and_go_on(context: str, depth: int) -> str:
    """Pages until the context has been rewritten."""
    return "<answer>1903</answer>" if SUMMARY in context else CALL


@dataclass(kw_only=True)
class Run:
    """A run of one Task with two generations, and what its engine was asked."""

    config: RunConfig
    store: MemoryStore
    engine: ScriptedEngine

    async def sample(self, model_dir: Path) -> list[tuple[Record, list[Turn]]]:
        """One sampler until the Task is settled; its Records and turns."""
        await self.store.insert_tasks([make_task("q", answer="1903")])
        await self.store.put_service(SERVICE)
        stop = asyncio.Event()
        chat = ChatFormat.load(model_dir)
        spending = read_spending(self.config, store=self.store)
        async with open_agents(self.config, self.store) as agents:
            parts = RunParts(
                config=self.config, store=self.store, chat=chat, scoring=agents.scoring,
                client=PaidClient(self.engine, spending=spending), browser=browser_of(agents, chat=chat),
                toolbox=FunctionToolbox([fetch], recovery=Recovery.STATELESS),
                caller=LiveCaller(journal=self.store, spending=spending),
            )  # fmt: skip
            running = asyncio.create_task(sample_run(parts, stop=stop))
            async with asyncio.timeout(30):
                while not running.done() and not (await self.store.count_tasks(split="train"))[TaskStatus.SETTLED]:
                    await asyncio.sleep(0.01)
            stop.set()
            await running
        records = await self.store.list_records(split="train")
        return [(record, await self.store.load_turns(record)) for record in records]

    @property
    def contexts(self) -> list[str]:
        return [
            self.engine.tokenizer.decode(list(request.input_ids), skip_special_tokens=False)
            for request in self.engine.requests
        ]


@asynccontextmanager
async def make_run(
    tmp_path: Path,
    *behaviours: Callable[[dict[str, Any]], str | Status | Fault],
    script: Callable[[str, int], str] = read_once,
    **rollout: Any,
) -> AsyncIterator[Run]:
    """A run whose browse agent has one model per behaviour, each behind a server of its own."""
    model_dir = write_tiny_chat(tmp_path / "chat")
    async with AsyncExitStack() as servers:
        urls = [(await servers.enter_async_context(chat_server(behave))).url for behave in behaviours]
        browse_agent = {
            "models": [{"base_url": url, "model": f"browser-{n}", "api_key": "k"} for n, url in enumerate(urls)],
            "browse_tools": ["fetch"], "min_prompt_length": 100, "max_prompt_length": 1500,
            "max_retries": 2, "retry_delay": 0.01, "timeout": 2,
        }  # fmt: skip
        (tmp_path / "agents.yml").write_text(yaml.safe_dump({"browse_agent": browse_agent}))
        price = {"per_call": 0.001, "per_million_tokens_in": 1, "per_million_tokens_out": 2}
        (tmp_path / "prices.yml").write_text(yaml.safe_dump({"browse": {"*": price}}))
        values = {
            "store": {"heartbeat_s": 0.2, "lease_s": 30},
            "rollout": {
                "num_generations": 2, "max_new_tokens": 200, "max_prompt_tokens": 3000, "num_train_epochs": 1,
                "repetition_early_stop_times": -1, "agent_config_path": tmp_path / "agents.yml", **rollout,
            },
            "inference": {"context_length": 4000},
            "algo": {"tasks_per_step": 100},
            "costs": {"price_file": tmp_path / "prices.yml", "budget_usd": 5},
        }  # fmt: skip
        engine = ScriptedEngine(model_dir, script)
        yield Run(config=RunConfig.model_validate(values), store=MemoryStore(), engine=engine)


def browse_calls(turns: list[Turn]) -> list[DispatchedSamplingTask]:
    return [call for turn in turns for call in turn.tools if call.kind is DispatchKind.BROWSE]


async def test_a_long_result_is_summarised_by_the_second_model_when_the_first_fails_and_is_paid_for(
    tmp_path: Path,
) -> None:
    async with make_run(tmp_path, lambda request: Status(503), lambda request: SUMMARY) as run:
        sampled = await run.sample(tmp_path / "chat")
    for record, turns in sampled:
        (call,) = browse_calls(turns)
        assert (record.stop_reason, record.score) == (StopReason.ANSWER, 1.0)
        assert (call.status, call.target, call.response["content"]) == ("ok", "browser-1", SUMMARY)
        assert "the year" in call.request["task"]
        assert (call.cost_nano_usd, record.cost_nano_usd) == (BROWSE_COST, BROWSE_COST)
    assert [SUMMARY in context for context in run.contexts].count(True) == 2
    assert not any("Nobody asked" in context for context in run.contexts)
    costs = await load_costs(run.store, config=run.config)
    assert costs.account_nano_usd == costs.calls_nano_usd == costs.records_nano_usd == 2 * BROWSE_COST
    (row,) = [row for row in costs.calls if row.kind is DispatchKind.BROWSE]
    assert (row.target, row.num_calls) == ("browser-1", 2)
    assert (await audit_run(run.store, config=run.config, run_dir=None)).is_clean


async def test_discard_all_goes_on_from_a_summary_that_the_browse_agent_wrote(tmp_path: Path) -> None:
    settings = {"new_context": "discard_all", "max_prompt_tokens": 2000, "max_turns": 12}
    page = re.compile(r"Summarise for this purpose")

    def behave(request: dict[str, Any]) -> str:
        """Pages stay long, so that the context fills; what was done so far becomes the summary."""
        return "long " * 150 if page.search(request["messages"][-1]["content"]) else SUMMARY

    async with make_run(tmp_path, behave, script=read_and_go_on, **settings) as run:
        sampled = await run.sample(tmp_path / "chat")
    for record, turns in sampled:
        assert (record.stop_reason, record.score) == (StopReason.ANSWER, 1.0)
        assert turns[-1].model.request["branch"] == {"strategy": "discard_all", "because": "context_limit"}
        written = [call for call in browse_calls(turns) if call.request["purpose"] == "context_summary"]
        assert {call.turn for call in written} == {turns[-1].model.turn}
        assert written[-1].response["content"] == SUMMARY
        assert record.cost_nano_usd == BROWSE_COST * len(browse_calls(turns))
    costs = await load_costs(run.store, config=run.config)
    assert costs.account_nano_usd == costs.calls_nano_usd == costs.records_nano_usd


@pytest.mark.parametrize(
    ("behaviour", "status", "is_billed"),
    [(Status(503), "overloaded", False), (Status(401), "auth", False), (Fault("malformed"), "invalid_reply", True)],
)
async def test_an_outage_of_every_model_leaves_the_result_as_it_is_and_a_typed_call(
    tmp_path: Path, behaviour: Status | Fault, status: str, is_billed: bool
) -> None:
    async with make_run(tmp_path, lambda request: behaviour, lambda request: behaviour) as run:
        sampled = await run.sample(tmp_path / "chat")
    for record, turns in sampled:
        (call,) = browse_calls(turns)
        assert (call.status, call.response["content"]) == (status, "")
        assert call.error
        assert (record.stop_reason, record.score) == (StopReason.ANSWER, 1.0)
        assert (call.cost_nano_usd > 0) == is_billed
    assert [PAGE in context for context in run.contexts].count(True) == 2
    costs = await load_costs(run.store, config=run.config)
    assert costs.account_nano_usd == costs.calls_nano_usd == costs.records_nano_usd


async def test_an_outage_while_a_context_is_summarised_is_a_typed_failure_and_never_a_score(tmp_path: Path) -> None:
    settings = {"new_context": "discard_all", "max_prompt_tokens": 2000, "max_turns": 12}
    async with make_run(tmp_path, lambda request: Status(503), script=read_and_go_on, **settings) as run:
        sampled = await run.sample(tmp_path / "chat")
    for record, _ in sampled:
        assert (record.status, record.stop_reason, record.score) == (RecordStatus.FAILED, StopReason.ENGINE_ERROR, None)
        assert "browser-0" in str(record.error)
        assert "503" in str(record.error)
