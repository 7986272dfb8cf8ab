"""What every Toolbox promises, run against MCP over stdio and against plain functions."""

import asyncio
import random
import sys
import time
from pathlib import Path

import pytest
import pytest_asyncio

from agentrl.protocols import Toolbox
from agentrl.tools import FunctionToolbox, McpToolbox, ServerConfig
from agentrl.tools.config_file import TransportKind
from agentrl.types import Recovery, ToolRequest, ToolStatus

pytestmark = pytest.mark.asyncio(loop_scope="module")

SERVER = Path(__file__).parents[1] / "data" / "tool_server.py"
MAX_RESULT_CHARS = 200


def echo(text: str) -> str:
    """Repeat a text."""
    return text


async def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


async def fail() -> str:
    """Report an error."""
    raise ValueError("no luck")


async def hang() -> str:
    """Never answer."""
    await asyncio.Event().wait()
    return ""


async def big(size: int) -> str:
    """Return many characters."""
    return "x" * size


async def open_mcp() -> Toolbox:
    server = ServerConfig(
        name="test",
        kind=TransportKind.STDIO,
        command=sys.executable,
        args=(str(SERVER),),
        recovery=Recovery.STATELESS,
        timeout_s=30,
        max_in_flight=16,
        sessions=1,
        description="python tool_server.py",
    )
    return await McpToolbox.open(
        [server], connect_timeout_s=30, max_result_chars=MAX_RESULT_CHARS, rng=random.Random(0)
    )


async def open_functions() -> Toolbox:
    return FunctionToolbox([echo, add, fail, hang, big], max_result_chars=MAX_RESULT_CHARS)


OPENERS = {"mcp": open_mcp, "functions": open_functions}


def request(name, /, **arguments):
    return ToolRequest(call_id="call-1", name=name, arguments=arguments)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=list(OPENERS))
async def toolbox(request):
    box = await OPENERS[request.param]()
    yield box
    await box.close()


async def test_every_tool_is_listed_with_a_name_a_description_and_an_object_schema(toolbox):
    specs = {spec.name: spec for spec in toolbox.list_tools()}
    assert {"echo", "add", "fail", "hang", "big"} <= set(specs)
    assert specs["add"].description == "Add two integers."
    assert specs["add"].parameters["type"] == "object"
    assert set(specs["add"].parameters["required"]) == {"a", "b"}
    assert toolbox.list_tools() == toolbox.list_tools()


async def test_a_good_call_returns_its_text(toolbox):
    result = await toolbox.call(request("add", a=2, b=40), deadline_s=10)
    assert (result.status, result.content, result.error) == (ToolStatus.OK, "42", None)


async def test_text_comes_back_unchanged(toolbox):
    text = 'quotes " and \\ and <tags> and \n lines and 汉字 🙂'
    assert (await toolbox.call(request("echo", text=text), deadline_s=10)).content == text


async def test_a_tool_that_reports_an_error_is_a_tool_error_with_its_text(toolbox):
    result = await toolbox.call(request("fail"), deadline_s=10)
    assert result.status is ToolStatus.TOOL_ERROR
    assert "no luck" in result.content
    assert "no luck" in result.error


@pytest.mark.parametrize(
    ("arguments", "named"), [({"a": 1}, "b"), ({"a": "one", "b": 2}, "one"), ({}, "a"), ({"a": 1.5, "b": 2}, "1.5")]
)
async def test_arguments_the_schema_forbids_are_refused_and_the_text_names_the_fault(toolbox, arguments, named):
    result = await toolbox.call(request("add", **arguments), deadline_s=10)
    assert result.status is ToolStatus.BAD_ARGUMENTS
    assert "add" in result.content
    assert named in result.content


async def test_an_unknown_tool_is_refused_with_the_nearest_name(toolbox):
    result = await toolbox.call(request("ad"), deadline_s=10)
    assert result.status is ToolStatus.UNKNOWN_TOOL
    assert "'add'" in result.content


async def test_a_malformed_request_comes_back_with_the_parsers_text(toolbox):
    broken = ToolRequest(call_id="call-1", name="add", arguments={}, error="expected a comma")
    result = await toolbox.call(broken, deadline_s=10)
    assert (result.status, result.error) == (ToolStatus.MALFORMED, "expected a comma")


async def test_a_hanging_tool_ends_at_its_deadline_and_the_toolbox_goes_on(toolbox):
    began = time.monotonic()
    result = await toolbox.call(request("hang"), deadline_s=0.3)
    assert result.status is ToolStatus.TIMEOUT
    assert 0.3 <= time.monotonic() - began < 5
    assert (await toolbox.call(request("add", a=1, b=1), deadline_s=10)).content == "2"


async def test_waiting_for_a_free_slot_counts_towards_the_deadline(toolbox):
    results = await asyncio.gather(*(toolbox.call(request("hang"), deadline_s=0.4) for _ in range(40)))
    assert {result.status for result in results} == {ToolStatus.TIMEOUT}
    assert (await toolbox.call(request("add", a=1, b=1), deadline_s=10)).content == "2"


async def test_a_long_result_is_cut_at_the_limit_and_says_so(toolbox):
    result = await toolbox.call(request("big", size=5000), deadline_s=10)
    assert result.status is ToolStatus.OK
    assert len(result.content) == MAX_RESULT_CHARS
    assert "5000 characters" in result.content
    exact = await toolbox.call(request("big", size=MAX_RESULT_CHARS), deadline_s=10)
    assert exact.content == "x" * MAX_RESULT_CHARS


async def test_cancelling_a_hundred_calls_at_once_cancels_them_all_and_leaves_the_toolbox_usable(toolbox):
    calls = [asyncio.create_task(toolbox.call(request("hang"), deadline_s=30)) for _ in range(100)]
    probe = await toolbox.call(request("hang"), deadline_s=0.2)  # lets the calls start
    assert probe.status is ToolStatus.TIMEOUT
    for call in calls:
        call.cancel()
    await asyncio.wait(calls, timeout=10)
    assert all(call.cancelled() for call in calls)
    results = await asyncio.gather(*(toolbox.call(request("add", a=n, b=1), deadline_s=10) for n in range(40)))
    assert [result.content for result in results] == [str(n + 1) for n in range(40)]


@pytest.mark.parametrize("name", list(OPENERS))
async def test_closing_ends_running_calls_as_cancelled_and_refuses_new_ones(name):
    box = await OPENERS[name]()
    calls = [asyncio.create_task(box.call(request("hang"), deadline_s=30)) for _ in range(20)]
    assert (await box.call(request("hang"), deadline_s=0.2)).status is ToolStatus.TIMEOUT
    await box.close()
    done, _ = await asyncio.wait(calls, timeout=5)
    assert {call.result().status for call in done} == {ToolStatus.CANCELLED}
    assert len(done) == 20
    assert (await box.call(request("echo", text="x"), deadline_s=5)).status is ToolStatus.CANCELLED
    await box.close()
