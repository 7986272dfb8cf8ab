"""The modes of the tool journal: what is called, what is answered in its place, and what is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from agentrl.config import JournalConfig
from agentrl.rollout.recorded_calls import RecordedCall, RecordedCalls
from agentrl.rollout.spending import Spending
from agentrl.rollout.tool_calls import PendingCall, ToolCaller, choose_caller
from agentrl.store import MemoryStore
from agentrl.tools import FunctionToolbox
from agentrl.types import Recovery, ResultOrigin, ToolCall, ToolRequest, ToolResult, ToolStatus

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Counter:
    """A tool that never answers twice the same, and may be held or fail."""

    def __init__(self, *, recovery: Recovery = Recovery.STATELESS) -> None:
        self.num_calls = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.fails: Callable[[int], bool] = lambda number: False

        async def look_up(query: str) -> str:
            """Look something up."""
            self.num_calls += 1
            number = self.num_calls
            await self.gate.wait()
            if self.fails(number):
                raise ValueError("no luck")
            return f"{query}: answer {number}"

        self.toolbox = FunctionToolbox([look_up], recovery=recovery)

    def pending(self, query: str = "q", *, record: str = "train:0:q1/g0", deadline_s: float = 5.0) -> PendingCall:
        [spec] = self.toolbox.list_tools()
        arguments: dict[str, Any] = {"query": query}
        return PendingCall(
            request=ToolRequest(call_id="1", name=spec.name, arguments=arguments),
            call=ToolCall(
                record_id=record, turn=0, index=1, server=spec.server, tool=spec.own_name, arguments=arguments
            ),
            spec=spec,
            toolbox=self.toolbox,
            deadline_s=deadline_s,
        )


def caller(
    store: MemoryStore | None = None, *, seed: int = 0, recorded: RecordedCalls | None = None, **settings: Any
) -> ToolCaller:
    config = JournalConfig(**settings)
    return choose_caller(config, seed=seed, store=store or MemoryStore(), spending=Spending(), recorded=recorded)


def recording(tool: Counter, *, query: str, content: str, record: str, at: datetime = NOW) -> RecordedCall:
    call = tool.pending(query, record=record).call
    return RecordedCall(call=call, result=ToolResult(status=ToolStatus.OK, content=content), at=at)


async def test_a_live_stateless_tool_is_called_every_time() -> None:
    tool, live = Counter(), caller()
    results = [await live.send(tool.pending()) for _ in range(2)]
    assert [result.content for result in results] == ["q: answer 1", "q: answer 2"]
    assert {result.origin for result in results} == {ResultOrigin.LIVE}


async def test_a_cached_result_answers_equal_calls_of_other_records_and_says_so() -> None:
    tool, cache = Counter(), caller(tool_journal="cache")
    first = await cache.send(tool.pending())
    again = await cache.send(tool.pending(record="train:1:q1/g3"))
    other = await cache.send(tool.pending("p"))
    assert (first.content, again.content, other.content) == ("q: answer 1", "q: answer 1", "p: answer 2")
    assert (first.origin, again.origin) == (ResultOrigin.LIVE, ResultOrigin.CACHE)


async def test_a_cached_result_that_is_too_old_is_asked_for_again_and_replaced() -> None:
    moment = [NOW]
    store = MemoryStore(clock=lambda: moment[0])
    tool, cache = Counter(), caller(store, tool_journal="cache", tool_cache_ttl_s={"look_up": 60.0, "*": 1e9})
    await cache.send(tool.pending())
    moment[0] += timedelta(seconds=59)
    assert (await cache.send(tool.pending())).content == "q: answer 1"
    moment[0] += timedelta(seconds=2)
    assert (await cache.send(tool.pending())).content == "q: answer 2"
    assert (await cache.send(tool.pending())).content == "q: answer 2"


@pytest.mark.parametrize("ttl", [{"python.look_up": 0.0, "*": 60.0}, {"python.*": 0.0}, {"other": 60.0}])
async def test_a_tool_without_a_time_to_live_is_never_cached(ttl: dict[str, float]) -> None:
    tool, cache = Counter(), caller(tool_journal="cache", tool_cache_ttl_s=ttl)
    assert [(await cache.send(tool.pending())).content for _ in range(2)] == ["q: answer 1", "q: answer 2"]


@pytest.mark.parametrize("recovery", [Recovery.STATEFUL, Recovery.JOURNALLED])
async def test_only_stateless_tools_are_answered_from_calls_of_other_records(recovery: Recovery) -> None:
    tool, cache = Counter(recovery=recovery), caller(tool_journal="cache")
    await cache.send(tool.pending())
    assert (await cache.send(tool.pending(record="train:0:q1/g1"))).content == "q: answer 2"


async def test_errors_are_not_cached() -> None:
    tool, cache = Counter(), caller(tool_journal="cache")
    tool.fails = lambda number: number == 1
    assert (await cache.send(tool.pending())).status is ToolStatus.TOOL_ERROR
    assert (await cache.send(tool.pending())).content == "q: answer 2"


async def test_of_equal_calls_at_the_same_time_only_one_is_made() -> None:
    tool, cache = Counter(), caller(tool_journal="cache")
    tool.gate.clear()
    running = [asyncio.create_task(cache.send(tool.pending(record=f"train:0:q{i}/g0"))) for i in range(16)]
    async with asyncio.timeout(5):
        while not tool.num_calls:
            await asyncio.sleep(0)
    tool.gate.set()
    results = await asyncio.gather(*running)
    assert tool.num_calls == 1
    assert {result.content for result in results} == {"q: answer 1"}
    assert sum(result.origin is ResultOrigin.CACHE for result in results) == 15


async def test_a_call_that_is_cancelled_lets_the_equal_one_behind_it_go_on() -> None:
    tool, cache = Counter(), caller(tool_journal="cache")
    tool.gate.clear()
    first = asyncio.create_task(cache.send(tool.pending()))
    async with asyncio.timeout(5):
        while not tool.num_calls:
            await asyncio.sleep(0)
    second = asyncio.create_task(cache.send(tool.pending(record="train:0:q1/g1")))
    await asyncio.sleep(0)
    first.cancel()
    tool.gate.set()
    assert (await second).content == "q: answer 2"
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_waiting_for_an_equal_call_counts_against_the_deadline() -> None:
    tool, cache = Counter(), caller(tool_journal="cache")
    tool.gate.clear()
    first = asyncio.create_task(cache.send(tool.pending()))
    async with asyncio.timeout(5):
        while not tool.num_calls:
            await asyncio.sleep(0)
    late = await cache.send(tool.pending(record="train:0:q1/g1", deadline_s=0.02))
    assert late.status is ToolStatus.TIMEOUT
    tool.gate.set()
    assert (await first).content == "q: answer 1"


async def test_the_cache_knows_what_a_journal_file_holds_unless_it_is_too_old() -> None:
    tool = Counter()
    store = MemoryStore(clock=lambda: NOW)
    calls = [
        recording(tool, query="new", content="from the file", record="old/g0", at=NOW - timedelta(seconds=10)),
        recording(tool, query="old", content="stale", record="old/g1", at=NOW - timedelta(seconds=1000)),
    ]
    recorded = RecordedCalls(tool.toolbox.list_tools(), calls)
    cache = caller(store, recorded=recorded, tool_journal="cache", tool_cache_ttl_s={"*": 60.0})
    assert (await cache.send(tool.pending("new"))).content == "from the file"
    assert (await cache.send(tool.pending("old"))).content == "old: answer 1"


async def test_replay_answers_each_call_of_a_record_as_it_was_and_never_calls_the_tool() -> None:
    tool = Counter()
    calls = [
        recording(tool, query="q", content="first", record="train:0:q1/g0"),
        recording(tool, query="q", content="second", record="train:0:q1/g1", at=NOW + timedelta(seconds=1)),
    ]
    recorded = RecordedCalls(tool.toolbox.list_tools(), calls)
    replay = caller(recorded=recorded, tool_journal="replay", tool_journal_file="j")
    contents = [(await replay.send(tool.pending(record=f"train:0:q1/g{i}"))).content for i in range(3)]
    assert contents == ["first", "second", "second"]
    unknown = await replay.send(tool.pending("p"))
    assert (unknown.status, unknown.status.is_infrastructure) == (ToolStatus.NOT_RECORDED, True)
    assert tool.num_calls == 0


@pytest.mark.parametrize("kind", ["crashed", "rate_limited", "tool_error"])
async def test_a_fault_takes_the_place_of_the_call(kind: str) -> None:
    tool, faulty = Counter(), caller(tool_journal="fault", tool_faults={"look_up": {kind: 1.0}})
    result = await faulty.send(tool.pending())
    assert (result.status, result.origin, tool.num_calls) == (ToolStatus(kind), ResultOrigin.FAULT, 0)


async def test_an_injected_timeout_takes_as_long_as_a_real_one() -> None:
    tool, faulty = Counter(), caller(tool_journal="fault", tool_faults={"*": {"timeout": 1.0}})
    started = asyncio.get_running_loop().time()
    assert (await faulty.send(tool.pending(deadline_s=0.05))).status is ToolStatus.TIMEOUT
    assert asyncio.get_running_loop().time() - started >= 0.05


async def test_a_slow_call_answers_after_its_wait_or_times_out_where_that_is_too_long() -> None:
    slow = {"tool_journal": "fault", "tool_faults": {"*": {"slow": 1.0}}, "tool_fault_slow_s": 0.03}
    tool = Counter()
    assert (await caller(**slow).send(tool.pending())).content == "q: answer 1"
    assert (await caller(**slow).send(tool.pending(deadline_s=0.02))).status is ToolStatus.TIMEOUT


async def test_faults_come_at_their_rate_and_the_same_ones_under_the_same_seed() -> None:
    async def fates(seed: int) -> list[ToolStatus]:
        tool = Counter()
        rates = {"look_up": {"crashed": 0.2, "tool_error": 0.1}}
        faulty = caller(seed=seed, tool_journal="fault", tool_faults=rates)
        return [(await faulty.send(tool.pending(str(number)))).status for number in range(1000)]

    drawn = await fates(1)
    assert 150 <= drawn.count(ToolStatus.CRASHED) <= 250
    assert 70 <= drawn.count(ToolStatus.TOOL_ERROR) <= 130
    assert drawn == await fates(1)
    assert drawn != await fates(2)


async def test_a_journalled_call_that_is_found_again_is_not_paid_again() -> None:
    tool, live = Counter(recovery=Recovery.JOURNALLED), caller()
    first, again = await live.send(tool.pending()), await live.send(tool.pending())
    assert replace(again, origin=ResultOrigin.LIVE) == first
    assert (again.origin, tool.num_calls) == (ResultOrigin.CACHE, 1)
