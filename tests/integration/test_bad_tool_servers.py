"""A fleet of tool servers that misbehave in every way we know, under 64 concurrent rollouts."""

import asyncio
import json
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import httpx2
import psutil
import pytest

from agentrl.chat import ChatFormat
from agentrl.cli.main import main
from agentrl.config import InferenceConfig, RolloutConfig, ToolsConfig
from agentrl.errors import ToolServerError
from agentrl.rollout.agent import Agent
from agentrl.rollout.sampler import MCPSampler
from agentrl.store import MemoryStore
from agentrl.tools import open_toolbox
from agentrl.tools.gateway.calls import GatewayLimits
from agentrl.tools.gateway.serving import serve_gateway
from agentrl.tools.guard import BreakerState
from agentrl.tools.servers.serving import listen
from agentrl.types import Record, RecordStatus, StopReason, Task, ToolRequest, ToolStatus
from left_behind import expect_nothing_left_behind
from refusing_endpoint import refusing_endpoint
from scripted_engine import ScriptedEngine
from tiny_chat import write_tiny_chat

SERVER = Path(__file__).parents[1] / "data" / "bad_tool_server.py"
PER_FAULT = 4
RECORD_TIMEOUT_S = 45.0
ANSWERED = {  # faults the model is told of, or does not notice: its answer counts
    "good": ToolStatus.OK,
    "floods": ToolStatus.OK,
    "slow_list": ToolStatus.OK,
    "wrong_schema": ToolStatus.OK,
    "huge_schema": ToolStatus.OK,
    "duplicates": ToolStatus.OK,
    "invalid_utf8": ToolStatus.OK,
    "is_error": ToolStatus.TOOL_ERROR,
    "hangs": ToolStatus.TIMEOUT,
    "malformed": ToolStatus.TIMEOUT,
}
ENDED = {  # faults that end a Record as `tool_error`, without a score
    "dies": ToolStatus.CRASHED,
    "dies_for_good": ToolStatus.CRASHED,
    "nonsense": ToolStatus.CRASHED,
    "429": ToolStatus.RATE_LIMITED,
    "401": ToolStatus.AUTH,
    "402": ToolStatus.QUOTA,
}


@pytest.fixture(autouse=True)
async def nothing_is_left_behind():
    with expect_nothing_left_behind():
        yield


def stdio(fault, *arguments, **settings):
    return {"command": "python", "args": ["-S", str(SERVER), fault, *map(str, arguments)], "timeout_s": 15, **settings}


async def open_servers(tmp_path, servers, **settings):
    path = tmp_path / "servers.json"
    path.write_text(json.dumps({"mcpServers": servers}), encoding="utf-8")
    return await open_toolbox(ToolsConfig(mcp_config=path, tool_connect_timeout_s=40, **settings))


def script(context, depth):
    """Call the tool the question names, then answer whatever came back."""
    if depth:
        return "<answer>5</answer>"
    name = context.rpartition("use ")[2].partition(" ")[0]
    return f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>'


def make_agent(model_dir, toolbox):
    async def commit(record, turn):
        return replace(record, turn_ids=(*record.turn_ids, turn.model.id))

    return Agent(
        chat=ChatFormat.load(model_dir),
        client=ScriptedEngine(model_dir, script),
        toolbox=toolbox,
        journal=MemoryStore(),
        commit_turn=commit,
        rollout=RolloutConfig(
            max_new_tokens=400, max_prompt_tokens=60_000, turn_timeout_s=40, record_timeout_s=RECORD_TIMEOUT_S
        ),
        inference=InferenceConfig(context_length=65_536),
        tool_timeout_s=15.0,
        clock=lambda: datetime.now(UTC),
    )


async def sample(agent, tool, generation):
    task = Task(
        id=f"train:0:{tool}",
        item_id=tool,
        split="train",
        epoch=0,
        query=f"use {tool} attempt {generation}",
        answer="5",
        num_generations=PER_FAULT,
    )
    record = Record(
        id=f"{task.id}/g{generation}",
        task_id=task.id,
        split="train",
        generation=generation,
        fence=1,
        status=RecordStatus.RUNNING,
    )
    return await MCPSampler(task, record=record, committed=(), agent=agent).sample()


async def test_64_rollouts_on_a_fleet_of_bad_servers_all_end_typed_in_time_and_the_good_ones_lose_nothing(tmp_path):
    model_dir = write_tiny_chat(tmp_path / "chat")
    faults = [*ANSWERED, *ENDED]
    async with refusing_endpoint() as endpoint:
        servers = {fault: stdio(fault) for fault in faults if not fault.isdigit()}
        servers["dies_for_good"] = stdio("dies_for_good", tmp_path / "dead", timeout_s=2)
        servers["hangs"] = stdio("hangs", timeout_s=1)
        servers["malformed"] = stdio("malformed", timeout_s=1)
        servers |= {
            status: {"url": f"{endpoint.url}/{status}/mcp", "retry_pause_s": 0.05} for status in ("401", "402", "429")
        }
        toolbox = await open_servers(tmp_path, servers, max_tool_result_chars=2000)
        agent = make_agent(model_dir, toolbox)
        began = asyncio.get_running_loop().time()
        ended = await asyncio.gather(*(sample(agent, f"{fault}.work", n) for fault in faults for n in range(PER_FAULT)))
        took_s = asyncio.get_running_loop().time() - began
        await toolbox.close()
    assert len(ended) == 64
    assert took_s < RECORD_TIMEOUT_S
    outcomes = Counter(
        (record.task_id.removeprefix("train:0:").removesuffix(".work"), record.stop_reason, turns[0].tools[0].status)
        for record, turns in ended
    )
    expected = {(fault, StopReason.ANSWER, status): PER_FAULT for fault, status in ANSWERED.items()}
    expected |= {(fault, StopReason.TOOL_ERROR, status): PER_FAULT for fault, status in ENDED.items()}
    assert outcomes == expected
    assert {record.score for record, _ in ended if record.stop_reason is StopReason.ANSWER} == {1.0}
    failed = [record for record, _ in ended if record.stop_reason is StopReason.TOOL_ERROR]
    assert {(record.status, record.score) for record in failed} == {(RecordStatus.FAILED, None)}
    assert all(record.error for record in failed)


@pytest.mark.parametrize(
    ("fault", "reason"), [("one_line", "a line of more than"), ("many_lines", "bytes that answer no request")]
)
async def test_a_server_that_floods_while_no_call_is_under_way_is_ended_in_bounded_memory(
    tmp_path, caplog, fault, reason
):
    process = psutil.Process()
    before = process.memory_info().rss
    toolbox = await open_servers(tmp_path, {"bad": stdio(fault, tmp_path / "flooded")})
    async with asyncio.timeout(20):
        while "was lost" not in caplog.text:
            await asyncio.sleep(0.01)
    assert reason in caplog.text
    assert await count_in(toolbox) == "1"  # in the process that took its place
    await toolbox.close()
    assert process.memory_info().rss - before < 64 << 20


async def test_a_server_that_never_initialises_is_refused_by_name_in_time(tmp_path):
    servers = {"mute": stdio("never_initialises", connect_timeout_s=1), "good": stdio("good")}
    async with asyncio.timeout(30):
        with pytest.raises(ToolServerError, match=r"'mute' .* did not start: no answer within the connect timeout"):
            await open_servers(tmp_path, servers)


async def test_a_tool_whose_schema_is_none_is_refused_with_its_place_in_one_line(tmp_path):
    with pytest.raises(ToolServerError, match=r"'odd' .*tools\.0\.inputSchema") as caught:
        await open_servers(tmp_path, {"odd": stdio("no_schema")})
    assert "\n" not in str(caught.value)


async def test_a_servers_list_may_name_a_tool_twice_and_the_blacklist_hides_tools(tmp_path):
    servers = {"twice": stdio("duplicates", blacklist=["count"])}
    toolbox = await open_servers(tmp_path, servers)
    assert [tool.name for tool in toolbox.list_tools()] == ["work"]
    await toolbox.close()


async def test_a_short_rate_limit_is_waited_out_within_the_call(tmp_path):
    async with refusing_endpoint(num_refusals=2, headers={"Retry-After": "0.1"}) as endpoint:
        servers = {"web": {"url": f"{endpoint.url}/429/mcp", "retry_pause_s": 0.05, "auth_token": "${TOKEN:-secret}"}}
        toolbox = await open_servers(tmp_path, servers)
        result = await toolbox.call(ToolRequest(call_id="1", name="work", arguments={}), deadline_s=20)
        await toolbox.close()
    assert (result.status, result.content, endpoint.num_calls) == (ToolStatus.OK, "done", 3)
    assert set(endpoint.authorizations) == {"Bearer secret"}


async def test_the_breaker_of_a_flapping_server_opens_lets_one_call_try_and_closes_again(tmp_path, caplog, capsys):
    work = ToolRequest(call_id="1", name="work", arguments={})

    async def call_many(count):
        results = await asyncio.gather(*(toolbox.call(work, deadline_s=20) for _ in range(count)))
        return Counter(result.status for result in results)

    async def breaker_when(state):
        while toolbox.breaker_states()["web"] is not state:
            await asyncio.sleep(0.01)

    async with refusing_endpoint(num_refusals=4) as endpoint, asyncio.timeout(30):
        web = {"url": f"{endpoint.url}/402/mcp", "breaker_failures": 3, "breaker_pause_s": 0.5, "max_retries": 0}
        toolbox = await open_servers(tmp_path, {"web": web})
        assert await call_many(3) == {ToolStatus.QUOTA: 3}
        async with gateway_over(toolbox) as base:
            assert await call_many(20) == {ToolStatus.QUOTA: 20}
            health, metrics = [await asyncio.to_thread(get, f"{base}/{path}") for path in ("health", "metrics")]
            code = await asyncio.to_thread(main, ["tools", "doctor", f"{base}/mcp"])
        assert endpoint.num_calls == 3  # none of the 20 was sent
        assert health.json() == {"status": "degraded", "failures_in_a_row": {"web": 0}, "breakers": {"web": "open"}}
        assert 'agentrl_gateway_breaker_open{server="web"} 1' in metrics.text
        assert (code, "circuit breaker is open" in capsys.readouterr().out) == (1, True)
        await breaker_when(BreakerState.HALF_OPEN)
        assert await call_many(20) == {ToolStatus.QUOTA: 20}
        assert endpoint.num_calls == 4  # one tried, and failed
        await breaker_when(BreakerState.HALF_OPEN)
        assert await call_many(20) == {ToolStatus.QUOTA: 19, ToolStatus.OK: 1}
        assert toolbox.breaker_states() == {"web": BreakerState.CLOSED}
        assert await call_many(20) == {ToolStatus.OK: 20}
        await toolbox.close()
    assert "fails again and again" in caplog.text
    assert "tool server web answers again" in caplog.text


@asynccontextmanager
async def gateway_over(toolbox):
    ready = asyncio.get_running_loop().create_future()
    with listen("127.0.0.1", 0) as listener:
        serving = asyncio.create_task(
            serve_gateway(
                toolbox, listener, token=None, limits=GatewayLimits(), on_ready=ready.set_result,
                breakers=toolbox.breaker_states,
            )
        )  # fmt: skip
        try:
            yield await ready
        finally:
            serving.cancel()
            await asyncio.wait({serving}, timeout=10)


def get(url):
    return httpx2.get(url, timeout=10)


@pytest.mark.parametrize("recovery", ["stateful", "stateless"])
async def test_a_connection_that_breaks_under_one_call_costs_the_others_nothing(tmp_path, recovery):
    async with refusing_endpoint(num_refusals=1, num_together=10) as endpoint:
        servers = {"web": {"url": f"{endpoint.url}/0/mcp", "recovery": recovery, "retry_pause_s": 0.01}}
        toolbox = await open_servers(tmp_path, servers)
        request = ToolRequest(call_id="1", name="work", arguments={})
        results = await asyncio.gather(*(toolbox.call(request, deadline_s=20) for _ in range(10)))
        await toolbox.close()
    statuses = Counter(result.status for result in results)
    assert statuses[ToolStatus.CRASHED] == (1 if recovery == "stateful" else 0)
    assert statuses[ToolStatus.OK] == (9 if recovery == "stateful" else 10)
    assert endpoint.num_sessions == 1


async def test_a_server_that_does_not_let_us_in_again_is_auth_at_once_and_works_when_it_does(tmp_path):
    async with refusing_endpoint(num_refusals=1, locks_when_broken=True) as endpoint:
        servers = {"web": {"url": f"{endpoint.url}/0/mcp", "timeout_s": 60, "breaker_pause_s": 0.1}}
        toolbox = await open_servers(tmp_path, servers)
        request = ToolRequest(call_id="1", name="work", arguments={})
        async with asyncio.timeout(30):
            statuses = [(await toolbox.call(request, deadline_s=60)).status for _ in range(4)]
            assert statuses == [ToolStatus.CRASHED, *[ToolStatus.AUTH] * 3]
            endpoint.is_locked = False
            while (result := await toolbox.call(request, deadline_s=60)).status is ToolStatus.AUTH:
                await asyncio.sleep(0.05)
        assert (result.content, endpoint.num_sessions) == ("done", 2)
        await toolbox.close()


async def test_a_wrong_token_at_the_start_is_named_with_its_http_status(tmp_path):
    async with refusing_endpoint(is_locked=True) as endpoint:
        with pytest.raises(ToolServerError, match=r"'web' .* did not start: .*HTTP 401"):
            await open_servers(tmp_path, {"web": {"url": f"{endpoint.url}/0/mcp"}})


async def count_in(box):
    return (await box.call(ToolRequest(call_id="1", name="count", arguments={}), deadline_s=20)).content


async def test_each_record_has_a_session_of_its_own_with_a_server_that_keeps_state(tmp_path):
    toolbox = await open_servers(tmp_path, {"state": stdio("good", scope="per_rollout")})
    async with toolbox.for_record() as one, toolbox.for_record() as other:
        assert [await count_in(box) for box in (one, one, other, one)] == ["1", "2", "1", "3"]
    async with toolbox.for_record() as next_one:
        assert await count_in(next_one) == "1"
        assert await asyncio.gather(*(count_in(next_one) for _ in range(5))) == ["2", "3", "4", "5", "6"]
    assert await count_in(toolbox) == "1"
    await toolbox.close()


async def test_over_http_too_each_record_opens_a_session_and_one_that_calls_nothing_opens_none(tmp_path):
    async with refusing_endpoint(num_refusals=0) as endpoint:
        toolbox = await open_servers(tmp_path, {"web": {"url": f"{endpoint.url}/0/mcp", "scope": "per_rollout"}})
        assert endpoint.num_sessions == 1  # to list the tools
        work = ToolRequest(call_id="1", name="work", arguments={})
        for num_calls in (2, 0, 1):
            async with toolbox.for_record() as box:
                results = [await box.call(work, deadline_s=20) for _ in range(num_calls)]
                assert [result.content for result in results] == ["done"] * num_calls
        await toolbox.close()
    assert endpoint.num_sessions == 3


async def test_a_record_whose_session_died_is_told_so_and_never_goes_on_without_its_state(tmp_path):
    toolbox = await open_servers(tmp_path, {"state": stdio("dies", scope="per_rollout")})
    async with toolbox.for_record() as box:
        assert await count_in(box) == "1"
        work = ToolRequest(call_id="1", name="work", arguments={})
        assert (await box.call(work, deadline_s=20)).status is ToolStatus.CRASHED
        again = await box.call(ToolRequest(call_id="1", name="count", arguments={}), deadline_s=20)
        assert again.status is ToolStatus.CRASHED
        assert "state" in again.content
    await toolbox.close()


async def test_records_wait_for_a_session_when_all_are_taken_and_a_record_that_ends_makes_room(tmp_path):
    toolbox = await open_servers(tmp_path, {"state": stdio("good", scope="per_rollout", sessions=1)})
    async with toolbox.for_record() as waiting:
        async with toolbox.for_record() as first:
            assert await count_in(first) == "1"
            early = await waiting.call(ToolRequest(call_id="1", name="count", arguments={}), deadline_s=0.2)
            assert early.status is ToolStatus.TIMEOUT
        assert await count_in(waiting) == "1"
    await toolbox.close()


async def test_a_record_that_is_cancelled_while_its_session_opens_leaves_nothing(tmp_path):
    toolbox = await open_servers(tmp_path, {"state": stdio("slow_list", scope="per_rollout")})

    async def use():
        async with toolbox.for_record() as box:
            await count_in(box)

    running = [asyncio.create_task(use()) for _ in range(8)]
    await asyncio.wait(running, timeout=0.3)
    for task in running:
        task.cancel()
    await asyncio.wait(running, timeout=20)
    assert all(task.cancelled() for task in running)
    await toolbox.close()


async def test_a_call_ends_before_its_turn_so_that_a_hanging_tool_costs_a_turn_and_not_the_record(tmp_path):
    toolbox = await open_servers(tmp_path, {"hangs": stdio("hangs", timeout_s=600)})
    agent = make_agent(write_tiny_chat(tmp_path / "chat"), toolbox)
    agent = replace(agent, rollout=agent.rollout.model_copy(update={"turn_timeout_s": 3.0}))
    record, turns = await sample(agent, "work", 0)
    assert (record.stop_reason, turns[0].tools[0].status) == (StopReason.ANSWER, ToolStatus.TIMEOUT)
    await toolbox.close()
