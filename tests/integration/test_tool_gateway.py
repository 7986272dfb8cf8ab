"""`agentrl tools serve` as a process before real tool servers: both protocols, failures, abuse."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
import time

import httpx2
import psutil
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from agentrl.config import ToolsConfig
from agentrl.tools import open_toolbox
from agentrl.types import ToolRequest, ToolStatus
from gateway_process import TEST_SERVER, TOKEN, client, running_gateway, tools_server, write_servers

STATEFUL_SERVER = TEST_SERVER.with_name("bad_tool_server.py")
CALCULATOR = {"command": "python", "args": ["-m", "agentrl.tools.servers.calculator"]}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    config = write_servers(
        tmp_path_factory.mktemp("gateway"),
        {
            "math": CALCULATOR,
            "test": tools_server(timeout_s=1.5),
            "twin": tools_server(recovery="stateless", timeout_s=1.5),
            "state": {"command": "python", "args": ["-S", str(STATEFUL_SERVER), "good"], "scope": "per_rollout"},
        },
    )
    with running_gateway(config, "--max-in-flight", "8") as url:
        yield url


def call(base, tool, arguments=None, **options):
    with client(base) as http:
        return http.post(f"/mcpapi/tool/{tool}", content=json.dumps(arguments or {}).encode("ascii"), **options)


def metric(base, start):
    with client(base) as http:
        text = http.get("/metrics").text
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(start))


def wait_until(condition, *, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_servers_and_tools_are_listed_as_agentdock_lists_them(base):
    with client(base) as http:
        assert http.get("/mcpapi/servers").json() == {"servers": ["math", "test", "twin", "state"]}
        names = [tool["function"]["name"] for tool in http.get("/mcpapi/tools").json()["tools"]]
        one = http.get("/mcpapi/server/math/tools").json()
        missing = http.get("/mcpapi/server/nothing/tools")
    assert {"math.calculator", "test.echo", "twin.echo"} <= set(names)
    assert one["server"] == "math"
    assert [tool["type"] for tool in one["tools"]] == ["function"]
    assert one["tools"][0]["function"]["name"] == "calculator"
    assert one["tools"][0]["function"]["parameters"]["required"] == ["expression"]
    assert missing.status_code == 404


@pytest.mark.parametrize(
    ("tool", "arguments", "content"),
    [
        ("test.echo", {"text": "some text"}, "some text"),
        ("test.echo", {"text": "2024"}, 2024),
        ("test.echo", {"text": '{"a": [1, 2]}'}, {"a": [1, 2]}),
        ("test.echo", {"text": "NaN"}, "NaN"),
        # Clients take these for errors when they are objects, but the tool did not fail.
        ("test.echo", {"text": '{"error": "none"}'}, '{"error": "none"}'),
        ("test.echo", {"text": "{}"}, "{}"),
        ("calculator", {"expression": "6*7"}, 42),
        ("test.numbers", {}, {"values": [1, 2]}),
        (
            "test.image",
            {},
            [
                {"type": "text", "text": "before"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
                {"type": "text", "text": "after"},
            ],
        ),
    ],
)
def test_a_success_is_content_decoded_from_json_where_that_loses_nothing(base, tool, arguments, content):
    reply = call(base, tool, arguments)
    assert (reply.status_code, reply.json()) == (200, {"content": content})


@pytest.mark.parametrize(
    ("tool", "arguments", "status", "detail"),
    [
        ("test.fail", {}, 424, "no luck"),
        ("test.add", {"a": "x"}, 422, "invalid arguments"),
        ("test.add", {"a": "\ud800", "b": 1}, 422, "invalid arguments"),
        ("test.nothing", {}, 404, "unknown tool"),
        ("test.hang", {}, 424, "did not answer"),  # it may have had an effect: clients repeat a 5xx
        ("twin.hang", {}, 504, "did not answer"),
    ],
)
def test_a_failure_has_an_http_status_and_a_body_in_both_known_error_shapes(base, tool, arguments, status, detail):
    reply = call(base, tool, arguments)
    body = reply.json()
    assert (reply.status_code, body["status_code"], body["status"]) == (status, status, "error")
    assert detail in body["detail"]
    assert body["content"]["error"] == body["detail"]


@pytest.mark.parametrize("body", [b"[]", b"{", b"\xff\xfe", b"null", b'"x"', b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused(base, body):
    with client(base) as http:
        reply = http.post("/mcpapi/tool/test.echo", content=body)
    assert (reply.status_code, reply.json()["agentrl_status"]) == (400, "malformed")


@pytest.mark.parametrize("path", ["/mcpapi/tool/test.echo", "/mcp"])
def test_arguments_that_are_too_large_are_refused_before_they_are_read(base, path):
    with client(base) as http:
        declared = http.post(path, content=b"x" * (5 * 1024 * 1024))
        streamed = http.post(path, content=(b"x" * 65536 for _ in range(100)))
    assert (declared.status_code, streamed.status_code) == (413, 413)
    assert call(base, "test.echo", {"text": "x" * 15_000}).json()["content"] == "x" * 15_000


@pytest.mark.parametrize("path", ["/mcpapi/servers", "/mcpapi/tool/test.echo", "/mcp", "/metrics"])
@pytest.mark.parametrize("token", ["", "wrong", TOKEN[:-1], TOKEN + "x"])
def test_nothing_but_health_is_answered_without_the_token(base, path, token):
    with client(base, token=token) as http:
        assert http.post(path, content=b"{}").status_code == 401
        assert http.get("/health").status_code == 200


def test_requests_of_web_pages_are_refused(base):
    assert call(base, "test.echo", {"text": "x"}, headers={"Origin": "http://localhost:3000"}).status_code == 403


@pytest.mark.parametrize("tool", ["../../etc/passwd", "%00", "test.echo/../x", "a" * 5000, "test.", ".", "%F0%9F"])
def test_odd_tool_names_are_unknown_tools(base, tool):
    assert call(base, tool).status_code in {404, 405}


async def test_mcp_clients_get_the_same_tools_and_typed_failures(base):
    box = await open_toolbox(ToolsConfig(mcp_manager_url=f"{base}/mcp", mcp_auth_token=TOKEN))
    try:
        assert {"calculator", "test.echo", "twin.echo"} <= {spec.name for spec in box.list_tools()}

        async def ask(name, **arguments):
            return await box.call(ToolRequest(call_id="1", name=name, arguments=arguments), deadline_s=20)

        assert (await ask("calculator", expression="6*7")).content == "42"
        failed = await ask("test.fail")
        assert (failed.status, failed.content) == (ToolStatus.TOOL_ERROR, "no luck")
        results = await asyncio.gather(*(ask("test.echo", text=str(n)) for n in range(60)))
        assert [result.content for result in results] == [str(n) for n in range(60)]
    finally:
        await box.close()


async def test_images_and_structured_content_pass_through_to_mcp_clients(base):
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with (
        httpx2.AsyncClient(headers=headers) as http,
        Client(streamable_http_client(f"{base}/mcp", http_client=http)) as mcp,
    ):
        pictures = await mcp.call_tool("test.image", {})
        numbers = await mcp.call_tool("test.numbers", {})
    assert [item.type for item in pictures.content] == ["text", "image", "text"]
    assert (pictures.content[1].data, pictures.content[1].mime_type) == ("aGk=", "image/png")
    assert numbers.structured_content == {"values": [1, 2]}


async def test_each_record_has_its_own_session_with_a_stateful_server_behind_the_gateway(base, tmp_path):
    count = ToolRequest(call_id="1", name="count", arguments={})
    gateway = {"url": f"{base}/mcp", "scope": "per_rollout", "auth_token": TOKEN}
    box = await open_toolbox(ToolsConfig(mcp_config=write_servers(tmp_path, {"gateway": gateway})))
    try:
        async with box.for_record() as one, box.for_record() as other:
            results = [await record.call(count, deadline_s=20) for record in (one, one, other, one)]
            processes = stateful_processes()
        assert [result.content for result in results] == ["1", "2", "1", "3"]
        assert len(processes) == 2
        await asyncio.to_thread(wait_until, lambda: not stateful_processes(), seconds=10)  # they end with their Record
    finally:
        await box.close()
    assert [call(base, "state.count").json()["content"] for _ in range(2)] == [1, 1]  # no session, no state


def stateful_processes():
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends while we look
            found += [child.pid] if str(STATEFUL_SERVER) in child.cmdline() else []
    return found


def test_a_client_that_leaves_ends_its_call(base):
    before = metric(base, 'agentrl_gateway_calls_total{server="test",tool="test.hang",status="cancelled"')
    with client(base) as http, pytest.raises(Exception, match="timed out"):
        http.post("/mcpapi/tool/test.hang", json={}, timeout=0.3)
    cancelled = 'agentrl_gateway_calls_total{server="test",tool="test.hang",status="cancelled"'
    wait_until(lambda: metric(base, cancelled) == before + 1, seconds=2)
    assert metric(base, "agentrl_gateway_in_flight") == 0


def test_a_killed_tool_server_comes_back_and_others_do_not_notice(base):
    first = call(base, "test.pid").json()["content"]
    os.kill(first, signal.SIGKILL)
    assert call(base, "math.calculator", {"expression": "1+1"}).json() == {"content": 2}
    wait_until(lambda: call(base, "test.pid").json().get("content") not in (None, first))
    assert not psutil.pid_exists(first) or psutil.Process(first).status() == psutil.STATUS_ZOMBIE


def test_slow_clients_hold_up_nobody(base):
    host, port = base.removeprefix("http://").split(":")
    head = b"POST /mcpapi/tool/test.echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n"
    slow = [socket.create_connection((host, int(port))) for _ in range(50)]
    for number, connection in enumerate(slow):
        connection.sendall(head if number % 2 else head + f"Authorization: Bearer {TOKEN}\r\n\r\n{{".encode())
    began = time.monotonic()
    assert call(base, "test.echo", {"text": "x"}).status_code == 200
    assert time.monotonic() - began < 5
    for connection in slow:
        connection.close()


def test_more_calls_than_slots_wait_for_their_turn(base):
    replies = []

    def ask():
        replies.append(call(base, "twin.hang").status_code)

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    wait_until(lambda: metric(base, "agentrl_gateway_in_flight") == 8, seconds=1.4)
    assert metric(base, "agentrl_gateway_waiting") == 4
    for thread in threads:
        thread.join(timeout=20)
    assert replies == [504] * 12
    assert metric(base, "agentrl_gateway_in_flight") == 0


def test_metrics_count_calls_by_outcome_and_name_nothing_a_client_made_up(base):
    before = metric(base, 'agentrl_gateway_calls_total{server="math",tool="calculator",status="ok"}')
    call(base, "math.calculator", {"expression": "1+1"})
    call(base, "evil%22%7D 1%0A", {})
    assert metric(base, 'agentrl_gateway_calls_total{server="math",tool="calculator",status="ok"}') == before + 1
    with client(base) as http:
        text = http.get("/metrics").text
    assert "evil" not in text
    assert 'agentrl_gateway_call_seconds_bucket{server="math",le="+Inf"}' in text


def test_health_names_servers_that_fail(base):
    call(base, "twin.hang")
    with client(base) as http:
        degraded = http.get("/health").json()
    call(base, "twin.echo", {"text": "x"})
    call(base, "test.echo", {"text": "x"})
    with client(base) as http:
        well = http.get("/health").json()
    assert degraded["status"] == "degraded"
    assert degraded["failures_in_a_row"]["twin"] >= 1
    assert well == {"status": "ok", "failures_in_a_row": {"math": 0, "test": 0, "twin": 0, "state": 0}, "breakers": {}}


def test_two_gateways_of_one_file_and_one_gateway_behind_another_work(base, tmp_path):
    nested = {"inner": {"url": f"{base}/mcp", "headers": {"Authorization": f"Bearer {TOKEN}"}}}
    config = write_servers(tmp_path, {**nested, "math": CALCULATOR})
    with running_gateway(config) as outer:
        assert call(outer, "math.calculator", {"expression": "2*3"}).json() == {"content": 6}
        assert call(outer, "inner.test.echo", {"text": "deep"}).json() == {"content": "deep"}
        assert call(outer, "inner.test.fail").json()["detail"] == "no luck"


def test_an_address_open_to_others_needs_a_token(tmp_path):
    config = write_servers(tmp_path, {"math": CALCULATOR})
    with (
        pytest.raises(AssertionError, match="MCP_GATEWAY_TOKEN"),
        running_gateway(config, "--host", "0.0.0.0", token=""),
    ):
        pass


def test_a_body_of_json_that_names_itself_an_error_stays_a_success(base):
    text = json.dumps({"status": "error", "output": "x"})
    assert call(base, "test.echo", {"text": text}).json() == {"content": text}
