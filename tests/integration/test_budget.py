"""Prices, budget and the cost ledger of whole runs: several samplers, refused calls, going on with more money."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.chat import ChatFormat
from agentrl.cli.launch.command import check_not_spent
from agentrl.cli.main import main
from agentrl.config import AlgoConfig, CostConfig, InferenceConfig, RolloutConfig, RunConfig, RunSection, StoreConfig
from agentrl.config.prices import NANO_PER_USD, PriceTable, usd
from agentrl.errors import BudgetSpentError
from agentrl.inspector import RunProgress
from agentrl.inspector.audit import audit_run
from agentrl.inspector.costs import load_costs, render_costs, render_estimate
from agentrl.protocols import Store
from agentrl.rollout.scoring import judge_dispatch
from agentrl.rollout.spending import PaidChat, PaidClient, Spending
from agentrl.rollout.tool_calls import LiveCaller
from agentrl.rollout.worker import run_sampler
from agentrl.scoring import JudgeCall, ScoreRequest, ScoringContext, score_request
from agentrl.store import MongoStore, open_store
from agentrl.tools import FunctionToolbox
from agentrl.types import DispatchKind, InferenceService, RecordStatus, Recovery, ServiceStatus, Task, TaskStatus
from chat_server import Usage, chat_server
from factories import make_record
from judges import judge_for
from scripted_engine import ScriptedEngine
from tiny_chat import write_tiny_chat

CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
SERVICE = InferenceService(id="scripted", base_url="http://scripted", status=ServiceStatus.UP, policy_version=0)
NUM_TASKS, NUM_GENERATIONS, CALLS_EACH = 5, 2, 3
PRICES = PriceTable.model_validate({"tool": {"add": {"per_call": 0.01}}})
TOKEN_PRICES = PriceTable.model_validate(
    {"tool": {"add": {"per_call": 0.01}}, "model": {"*": {"per_million_tokens_in": 1, "per_million_tokens_out": 3}}}
)


MODEL_PRICES = PriceTable(model=TOKEN_PRICES.model)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat(tmp_path_factory.mktemp("chat"))


def make_config(**costs: Any) -> RunConfig:
    return RunConfig(
        run=RunSection(run_name="priced"),
        store=StoreConfig(heartbeat_s=0.2, lease_s=30),
        rollout=RolloutConfig(
            num_generations=NUM_GENERATIONS, max_new_tokens=200, max_prompt_tokens=3000, num_train_epochs=1
        ),
        inference=InferenceConfig(context_length=4000),
        algo=AlgoConfig(tasks_per_step=100),
        costs=CostConfig(**costs),
    )


def solve(context: str, depth: int) -> str:
    """Three turns with a call each, then the answer."""
    return CALL if context.count("<tool_response>") < CALLS_EACH else "<answer>5</answer>"


class Calls:
    """Counts what really reaches the tool."""

    def __init__(self) -> None:
        self.count = 0

    def toolbox(self) -> FunctionToolbox:
        async def add(a: int, b: int) -> str:
            """Sum of two integers."""
            self.count += 1
            await asyncio.sleep(0)
            return str(a + b)

        return FunctionToolbox([add], recovery=Recovery.STATELESS)


async def load_tasks(store: Store) -> None:
    await store.insert_tasks(
        [
            Task(
                id=f"train:0:q{number}", item_id=f"q{number}", split="train", epoch=0, query=f"{number}: 2+3?",
                answer="5", num_generations=NUM_GENERATIONS,
            )
            for number in range(NUM_TASKS)
        ]
    )  # fmt: skip
    await store.put_service(SERVICE)


async def sample(
    store: Store, model_dir: Path, calls: Calls, *, budget_usd: float | None, prices: PriceTable = PRICES
) -> None:
    """One sampler until all is settled. Raises BudgetSpentError."""
    spending = Spending(prices=prices, account=store, budget_usd=budget_usd)
    stop = asyncio.Event()
    running = asyncio.create_task(
        run_sampler(
            make_config(), store=store, toolbox=calls.toolbox(),
            client=PaidClient(ScriptedEngine(model_dir, solve), spending=spending),
            chat=ChatFormat.load(model_dir), stop=stop, caller=LiveCaller(journal=store, spending=spending),
        )
    )  # fmt: skip
    async with asyncio.timeout(60):
        while not running.done():
            if (await store.count_tasks(split="train")).get(TaskStatus.SETTLED, 0) == NUM_TASKS:
                break
            await asyncio.sleep(0.02)
    stop.set()
    await running


async def test_two_samplers_stop_before_the_call_that_would_exceed_the_budget_and_more_money_goes_on(
    mongo_store: MongoStore, mongo_uri: str, database_name: str, model_dir: Path
) -> None:
    await load_tasks(mongo_store)
    other = open_store(mongo_uri, database=database_name)
    await other.prepare()
    calls = Calls()
    try:
        outcomes = await asyncio.gather(
            *(sample(store, model_dir, calls, budget_usd=0.115) for store in (mongo_store, other)),
            return_exceptions=True,
        )
    finally:
        await other.close()
    assert [type(outcome) for outcome in outcomes] == [BudgetSpentError, BudgetSpentError]
    assert "budget_usd = 0.115 is spent: 0.11 used" in str(outcomes[0])
    assert calls.count == 11
    counts = await mongo_store.count_tasks(split="train")
    assert counts.get(TaskStatus.RUNNING, 0) == 0
    assert counts[TaskStatus.PENDING] > 0
    put_down = [r for r in await mongo_store.list_records(split="train") if r.status is RecordStatus.RUNNING]
    kept = {record.id: record.turn_ids for record in put_down}
    assert any(kept.values())
    assert (await audit_run(mongo_store, config=make_config(), run_dir=None)).is_clean

    await sample(mongo_store, model_dir, calls, budget_usd=10)
    assert calls.count == NUM_TASKS * NUM_GENERATIONS * CALLS_EACH
    for record in await mongo_store.list_records(split="train"):
        assert record.status is RecordStatus.FINISHED
        assert record.turn_ids[: len(kept.get(record.id, ()))] == kept.get(record.id, ())
    report = await load_costs(mongo_store, config=make_config())
    spent = NUM_TASKS * NUM_GENERATIONS * CALLS_EACH * NANO_PER_USD // 100
    assert report.account_nano_usd == report.calls_nano_usd == report.records_nano_usd == spent
    assert (await audit_run(mongo_store, config=make_config(), run_dir=None)).is_clean


async def test_the_ledger_equals_the_sum_of_calls_tokens_included(store: Store, model_dir: Path) -> None:
    await load_tasks(store)
    await sample(store, model_dir, Calls(), budget_usd=None, prices=TOKEN_PRICES)
    records = await store.list_records(split="train")
    by_hand = 0
    for record in records:
        turns = await store.load_turns(record)
        context = 0
        cost = 0
        for turn in turns:
            context += len(turn.tokens.prompt_ids)
            cost += 1000 * context + 3000 * len(turn.tokens.completion_ids) + 10_000_000 * len(turn.tools)
            context += len(turn.tokens.completion_ids)
        assert record.cost_nano_usd == cost
        by_hand += cost
    report = await load_costs(store, config=make_config())
    assert report.account_nano_usd == report.calls_nano_usd == report.records_nano_usd == by_hand
    assert {call.kind for call in report.calls} == {DispatchKind.MODEL, DispatchKind.TOOL}
    assert (await audit_run(store, config=make_config(), run_dir=None)).is_clean  # type: ignore[arg-type]


async def test_a_judge_is_paid_for_its_tokens_and_refused_when_nothing_is_left(memory_store: Store) -> None:
    prices = PriceTable.model_validate({"judge": {"judge-0": {"per_call": 0.001, "per_million_tokens_out": 1000}}})
    spending = Spending(prices=prices, account=memory_store, budget_usd=0.0045)
    request = ScoreRequest(answer="Leonardo", ground_truth={"query": "Who?", "answer": "Leonardo da Vinci"})
    calls: list[JudgeCall] = []
    async with chat_server(lambda request: "A") as server, judge_for([server.url], memory_store) as free:
        chat = PaidChat(free.chat, kind=DispatchKind.JUDGE, spending=spending)
        judge = replace(free, chat=chat)
        context = ScoringContext(judge=judge)
        assert await score_request("simpleqa", request, context=context, calls=calls) == 1.0
        assert await score_request("simpleqa", request, context=context, calls=calls) == 1.0  # known by now
        with pytest.raises(BudgetSpentError, match="a judge call may cost"):
            await score_request("simpleqa", replace(request, answer="Leo"), context=context, calls=calls)
        assert len(server.requests) == 1
    cost = 1_000_000 + 3 * 1_000_000
    assert [call.cost_nano_usd for call in calls] == [cost]
    assert await memory_store.spent() == cost
    await memory_store.put_calls([judge_dispatch(call, record=make_record()) for call in calls])
    assert [(each.kind, each.cost_nano_usd) for each in await memory_store.sum_calls()] == [(DispatchKind.JUDGE, cost)]


async def test_a_judge_that_costs_by_its_reply_alone_is_paid_and_one_that_counts_nothing_costs_what_was_reserved(
    memory_store: Store,
) -> None:
    prices = PriceTable.model_validate({"judge": {"judge-0": {"per_million_tokens_out": 1000}}})
    spending = Spending(prices=prices, account=memory_store, budget_usd=1)

    def behave(request: dict[str, Any]) -> Usage:
        return Usage("A", request["attempt"] * 11)

    async with chat_server(behave) as server, judge_for([server.url], memory_store) as free:
        chat = PaidChat(free.chat, kind=DispatchKind.JUDGE, spending=spending)
        replies = [await chat.complete([{"role": "user", "content": "?"}], deadline_s=5) for _ in range(2)]
    assert [reply.cost_nano_usd for reply in replies] == [1_000_000, 3_000_000]
    assert await memory_store.spent() == 4_000_000


async def test_a_model_call_that_would_exceed_the_budget_is_not_made(memory_store: Store, model_dir: Path) -> None:
    await load_tasks(memory_store)
    with pytest.raises(BudgetSpentError, match="a completion may cost"):
        await sample(memory_store, model_dir, Calls(), budget_usd=0.001, prices=MODEL_PRICES)
    assert 0 < await memory_store.spent() <= 0.001 * NANO_PER_USD


async def test_the_estimate_from_the_first_records_meets_what_the_run_then_costs(
    memory_store: Store, model_dir: Path
) -> None:
    await load_tasks(memory_store)
    config = make_config(price_file="p.yml", budget_usd=100)
    assert "no estimate yet" in render_estimate(await load_costs(memory_store, config=config))
    await sample(memory_store, model_dir, Calls(), budget_usd=None)
    report = await load_costs(memory_store, config=config)
    expected_records = 100 * NUM_GENERATIONS * config.train.max_steps
    assert report.estimate is not None
    assert report.estimate.num_expected == expected_records
    assert report.estimate.total_usd == pytest.approx(0.03 * expected_records)
    assert report.estimate.standard_error_usd == 0
    assert "covers about" in render_estimate(report)
    assert report.as_json()["targets"][0]["usd"] == pytest.approx(0.3)
    render_costs(report)


def test_a_sampler_whose_run_has_spent_its_budget_ends_with_its_own_exit_code(
    mongo_uri: str, database_name: str, model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def spend() -> None:
        store = open_store(mongo_uri, database=database_name)
        await store.prepare()
        await load_tasks(store)
        assert await store.reserve("r", amount=NANO_PER_USD, limit=None)
        await store.close()

    asyncio.run(spend())
    prices = tmp_path / "prices.yml"
    prices.write_text("tool: {'*': {per_call: 0.01}}")
    flags = [
        *("--db_connection_string", mongo_uri, "--model_name_or_path", str(model_dir), "--log_dir", str(tmp_path)),
        *("--output_dir", str(tmp_path), "--price_file", str(prices)),
    ]
    assert main(["sample", database_name, *flags, "--budget_usd", "1"]) == 4
    assert "budget_usd = 1 is spent: 1 used or reserved" in capsys.readouterr().err
    assert main(["cost", database_name, *flags, "--budget_usd", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["spent_usd"], report["not_on_stored_calls_usd"], report["budget_usd"]) == (1.0, 1.0, 1.0)
    assert main(["cost", database_name, *flags, "--budget_usd", "1"]) == 0
    shown = capsys.readouterr().out
    assert "spent: $1.0000 of a budget of $1.0000" in shown
    assert "no estimate yet" in shown


def test_a_launch_that_ran_out_of_money_says_after_which_step() -> None:
    config = make_config(price_file="p.yml", budget_usd=2)
    progress = RunProgress(run_name="priced", max_steps=40, steps=(), tasks={}, workers=(), services=())
    check_not_spent(config, progress=progress, is_spent=False)
    with pytest.raises(BudgetSpentError, match="ended after step 0 of 40"):
        check_not_spent(config, progress=progress, is_spent=True)
    assert usd(NANO_PER_USD) == 1
