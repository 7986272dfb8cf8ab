import asyncio
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.tools.failures import CallFailedError
from agentrl.tools.guard import CallGuard, CircuitBreaker, RateLimit
from agentrl.tools.server_config import ServerConfig, TransportKind
from agentrl.types import Recovery, ToolResult, ToolStatus

SERVER = ServerConfig(
    name="web",
    kind=TransportKind.HTTP,
    recovery=Recovery.STATEFUL,
    timeout_s=5,
    max_in_flight=4,
    sessions=1,
    max_retries=2,
    retry_pause_s=0.01,
    description="a server",
)
OK = ToolResult(status=ToolStatus.OK, content="fine")


def failed(status, *, was_refused=False, retry_after_s=None):
    return CallFailedError(status.value, status=status, was_refused=was_refused, retry_after_s=retry_after_s)


class Script:
    """Outcomes to play, one an attempt."""

    def __init__(self, *outcomes):
        self.outcomes = list(outcomes)
        self.num_sent = 0

    async def send(self, deadline):
        self.num_sent += 1
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


async def play(script, *, deadline_s=5.0, guard=None, **settings):
    guard = guard or CallGuard(replace(SERVER, **settings), rng=random.Random(0))
    return await guard.call("search", send=script.send, deadline_s=deadline_s)


async def test_a_rate_limit_is_waited_out_whatever_the_tool_leaves_behind():
    script = Script(*[failed(ToolStatus.RATE_LIMITED, was_refused=True)] * 2, OK)
    assert await play(script) == OK
    assert script.num_sent == 3


async def test_a_rate_limit_that_stays_is_the_result():
    script = Script(*[failed(ToolStatus.RATE_LIMITED, was_refused=True)] * 3)
    assert (await play(script)).status is ToolStatus.RATE_LIMITED


async def test_a_pause_that_does_not_fit_the_deadline_is_not_begun():
    began = asyncio.get_running_loop().time()
    script = Script(failed(ToolStatus.RATE_LIMITED, was_refused=True, retry_after_s=60))
    assert (await play(script, deadline_s=0.5)).status is ToolStatus.RATE_LIMITED
    assert script.num_sent == 1
    assert asyncio.get_running_loop().time() - began < 0.4


async def test_a_pause_is_never_shorter_than_the_server_asks_for():
    loop = asyncio.get_running_loop()
    began = loop.time()
    script = Script(failed(ToolStatus.RATE_LIMITED, was_refused=True, retry_after_s=0.2), OK)
    assert await play(script) == OK
    assert loop.time() - began >= 0.2


@pytest.mark.parametrize(
    ("recovery", "num_sent"), [(Recovery.STATELESS, 3), (Recovery.JOURNALLED, 1), (Recovery.STATEFUL, 1)]
)
async def test_a_crash_is_repeated_only_where_a_repeat_does_no_harm(recovery, num_sent):
    script = Script(*[failed(ToolStatus.CRASHED)] * 3)
    assert (await play(script, recovery=recovery)).status is ToolStatus.CRASHED
    assert script.num_sent == num_sent


@pytest.mark.parametrize(
    "status",
    [ToolStatus.TIMEOUT, ToolStatus.AUTH, ToolStatus.QUOTA, ToolStatus.TOOL_ERROR, ToolStatus.BAD_ARGUMENTS],
)
async def test_what_a_repeat_cannot_cure_is_not_repeated(status):
    script = Script(failed(status, was_refused=True))
    assert (await play(script, recovery=Recovery.STATELESS)).status is status
    assert script.num_sent == 1


async def test_after_failures_in_a_row_the_server_is_left_alone_and_then_tried_once():
    guard = CallGuard(
        replace(SERVER, max_retries=0, breaker_failures=3, breaker_pause_s=0.2, recovery=Recovery.STATELESS),
        rng=random.Random(0),
    )
    script = Script(*[failed(ToolStatus.AUTH)] * 4, OK, OK)
    results = [await play(script, guard=guard) for _ in range(6)]
    assert {result.status for result in results} == {ToolStatus.AUTH}
    assert script.num_sent == 3
    loop = asyncio.get_running_loop()
    until = loop.time() + 5
    while script.num_sent == 3 and loop.time() < until:
        await play(script, guard=guard)
        await asyncio.sleep(0.01)
    assert script.num_sent == 4  # the one that may try failed
    while script.num_sent == 4 and loop.time() < until:
        await play(script, guard=guard)
        await asyncio.sleep(0.01)
    assert (await play(script, guard=guard)).status is ToolStatus.OK


def test_while_one_call_tries_an_open_breaker_the_others_are_held_back():
    breaker = CircuitBreaker(num_failures=1, pause_s=10)
    assert breaker.note(ToolStatus.CRASHED, now=0.0)
    assert breaker.blocked_by(9.9) is ToolStatus.CRASHED
    assert breaker.blocked_by(10.0) is None
    assert breaker.blocked_by(10.1) is ToolStatus.CRASHED
    breaker.note(ToolStatus.OK, now=11.0)
    assert breaker.blocked_by(11.0) is None


def test_timeouts_between_failures_neither_open_nor_close_a_breaker():
    breaker = CircuitBreaker(num_failures=2, pause_s=10)
    for status in (ToolStatus.CRASHED, ToolStatus.TIMEOUT, ToolStatus.CANCELLED):
        assert not breaker.note(status, now=0.0)
    assert breaker.note(ToolStatus.CRASHED, now=0.0)
    assert breaker.blocked_by(1.0) is ToolStatus.CRASHED


async def test_a_call_for_which_the_rate_limit_leaves_no_time_is_not_sent():
    guard = CallGuard(replace(SERVER, rate_limit_per_s=1.0), rng=random.Random(0))
    script = Script(OK, OK)
    assert await play(script, guard=guard) == OK
    result = await play(script, guard=guard, deadline_s=0.3)
    assert (result.status, script.num_sent) == (ToolStatus.RATE_LIMITED, 1)
    assert "1 calls/s" in result.content


@given(per_s=st.floats(0.1, 200), gaps=st.lists(st.floats(0, 2), min_size=2, max_size=60))
def test_no_second_ever_has_more_calls_than_the_limit_and_its_burst(per_s, gaps):
    limit, now, starts = RateLimit(per_s), 0.0, []
    for gap in gaps:
        now += gap
        wait_s = limit.reserve(now, latest=float("inf"))
        assert wait_s >= 0
        starts.append(now + wait_s)
    starts.sort()
    for first, start in enumerate(starts):
        in_second = sum(start <= other < start + 1 for other in starts[first:])
        assert in_second <= 2 * max(per_s, 1) + 1
