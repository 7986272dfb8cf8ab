"""McpToolbox against real servers: child processes over stdio, HTTP and SSE on loopback, killed, wedged and broken."""

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from aiohttp import web

from agentrl.config import ToolsConfig
from agentrl.config.marks import LAUNCH_MARK
from agentrl.errors import ToolServerError
from agentrl.tools import McpToolbox, open_toolbox
from agentrl.tools.config_file import load_server_configs
from agentrl.types import Recovery, ToolRequest, ToolStatus
from left_behind import children, expect_nothing_left_behind

ROOT = Path(__file__).parents[2]
SERVER = ROOT / "tests" / "data" / "tool_server.py"
STUBBORN = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.stderr.write("starting up\\nlicence file missing\\n"); sys.stderr.flush()
while True:
    print("Welcome to the tool!", flush=True)
    time.sleep(0.05)
"""


def request(name, /, **arguments):
    return ToolRequest(call_id="call-1", name=name, arguments=arguments)


def stdio(**options):
    return {"command": "python", "args": [str(SERVER)], **options}


def tools_config(tmp_path, servers, **settings):
    path = tmp_path / "servers.json"
    path.write_text(json.dumps({"mcpServers": servers}), encoding="utf-8")
    return ToolsConfig(mcp_config=path, **settings)


@pytest.fixture(autouse=True)
async def nothing_is_left_behind():
    """No child, task or open file of a test survives it."""
    with expect_nothing_left_behind():
        yield


@contextlib.contextmanager
def process_of(*arguments):
    process = subprocess.Popen([sys.executable, *arguments], stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=10)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


async def wait_until(condition, *, seconds=20):
    """Poll a condition that no event reports: the death of a process that is not ours to wait for."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def test_the_bundled_servers_work_from_the_file_that_comes_with_the_project():
    box = await open_toolbox(ToolsConfig(mcp_config=ROOT / "assets" / "mcp_servers.json"))
    assert [spec.name for spec in box.list_tools()] == ["calculator", "search"]
    assert all(spec.recovery is Recovery.STATELESS for spec in box.list_tools())
    assert (await box.call(request("calculator", expression="37*24"), deadline_s=10)).content == "888"
    broken = await box.call(request("calculator", expression="import os"), deadline_s=10)
    assert broken.status is ToolStatus.TOOL_ERROR
    assert broken.content.startswith("error: ")
    await box.close()


@pytest.mark.parametrize("module", ["calculator", "search"])
def test_a_bundled_server_ends_when_its_stdin_closes(module):
    command = [sys.executable, "-m", f"agentrl.tools.servers.{module}"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=20, check=False)
    assert (done.returncode, done.stdout) == (0, b"")


async def test_a_bundled_server_speaks_http_too():
    with process_of("-m", "agentrl.tools.servers.calculator", "--http", "--port", "0") as process:
        url = process.stderr.readline().removeprefix("listening on ").strip()
        box = await open_toolbox(ToolsConfig(mcp_manager_url=url))
        assert (await box.call(request("calculator", expression="6*7"), deadline_s=10)).content == "42"
        await box.close()


async def test_images_and_structured_content_become_text(tmp_path):
    box = await open_toolbox(tools_config(tmp_path, {"test": stdio()}))
    assert (await box.call(request("image"), deadline_s=10)).content == "before\n[Image: image/png]\nafter"
    assert json.loads((await box.call(request("numbers"), deadline_s=10)).content) == {"values": [1, 2]}
    await box.close()


async def test_keys_are_masked_in_the_items_and_the_structured_content_that_a_gateway_passes_on(tmp_path):
    box = await open_toolbox(tools_config(tmp_path, {"test": stdio(env={"API_KEY": "before", "TOKEN": "values"})}))
    image = await box.call(request("image"), deadline_s=10)
    assert [item.get("text") for item in image.items] == ["***", None, "after"]
    assert (await box.call(request("numbers"), deadline_s=10)).structured == {"***": [1, 2]}
    await box.close()


async def test_a_tool_that_two_servers_offer_is_named_after_its_server(tmp_path):
    config = tools_config(tmp_path, {"left": stdio(env={"SIDE": "l"}), "right": stdio()})
    box = await open_toolbox(config)
    names = {spec.name for spec in box.list_tools()}
    assert {"left.pid", "right.pid"} <= names
    assert "pid" not in names
    pids = [(await box.call(request(f"{side}.pid"), deadline_s=10)).content for side in ("left", "right")]
    assert pids[0] != pids[1]
    await box.close()


async def test_only_the_chosen_server_is_started(tmp_path):
    servers = {"one": stdio(), "broken": {"command": "no-such-program"}}
    box = await open_toolbox(tools_config(tmp_path, servers, mcp_server_name="one"))
    assert {spec.server for spec in box.list_tools()} == {"one"}
    await box.close()


async def test_calls_of_a_stateless_server_survive_its_sigkill(tmp_path):
    box = await open_toolbox(tools_config(tmp_path, {"test": stdio(recovery="stateless")}))
    victim = int((await box.call(request("pid"), deadline_s=10)).content)
    first_done = asyncio.Event()

    async def add(n):
        result = await box.call(request("add", a=n, b=1), deadline_s=30)
        first_done.set()
        return result

    calls = [asyncio.create_task(add(n)) for n in range(300)]
    await first_done.wait()
    os.kill(victim, signal.SIGKILL)
    results = await asyncio.gather(*calls)
    assert [result.content for result in results] == [str(n + 1) for n in range(300)]
    assert int((await box.call(request("pid"), deadline_s=10)).content) != victim
    await box.close()


async def test_a_call_in_flight_on_a_server_with_state_is_not_repeated_when_it_dies(tmp_path):
    box = await open_toolbox(tools_config(tmp_path, {"test": stdio()}))
    log = tmp_path / "calls"
    result = await box.call(request("crash", log=str(log)), deadline_s=30)
    assert result.status is ToolStatus.CRASHED
    assert log.read_text(encoding="utf-8").count("called") == 1
    assert (await box.call(request("add", a=1, b=1), deadline_s=30)).content == "2"
    await box.close()


async def test_a_call_that_kills_its_stateless_server_is_given_up_after_two_repeats(tmp_path):
    box = await open_toolbox(tools_config(tmp_path, {"test": stdio(recovery="stateless")}))
    log = tmp_path / "calls"
    result = await box.call(request("crash", log=str(log)), deadline_s=60)
    assert result.status is ToolStatus.CRASHED
    assert log.read_text(encoding="utf-8").count("called") == 3
    await box.close()


async def test_a_server_with_state_that_died_between_calls_is_restarted_before_the_next(tmp_path):
    box = await open_toolbox(tools_config(tmp_path, {"test": stdio()}))
    victim = int((await box.call(request("pid"), deadline_s=10)).content)
    before = children()
    os.kill(victim, signal.SIGKILL)
    await wait_until(lambda: children() - before)
    assert (await box.call(request("add", a=1, b=1), deadline_s=30)).status is ToolStatus.OK
    await box.close()


async def test_a_wedged_server_times_out_and_is_replaced(tmp_path):
    box = await open_toolbox(tools_config(tmp_path, {"test": stdio()}, tool_connect_timeout_s=4))
    victim = int((await box.call(request("pid"), deadline_s=10)).content)
    os.kill(victim, signal.SIGSTOP)
    result = await box.call(request("add", a=1, b=1), deadline_s=0.5)
    assert result.status is ToolStatus.TIMEOUT
    await wait_until(lambda: not psutil.pid_exists(victim), seconds=30)
    assert (await box.call(request("add", a=1, b=1), deadline_s=30)).content == "2"
    await box.close()


async def test_a_server_own_time_limit_bounds_its_calls(tmp_path):
    box = await open_toolbox(tools_config(tmp_path, {"test": stdio(timeout_s=0.3)}))
    result = await box.call(request("hang"), deadline_s=60)
    assert result.status is ToolStatus.TIMEOUT
    assert "0.3 s" in result.content
    await box.close()


async def test_several_sessions_are_several_processes_that_share_the_calls(tmp_path):
    box = await open_toolbox(tools_config(tmp_path, {"test": stdio(sessions=2)}))
    results = await asyncio.gather(*(box.call(request("pid"), deadline_s=10) for _ in range(20)))
    assert len({result.content for result in results}) == 2
    await box.close()


async def test_an_http_server_may_come_up_late_die_and_come_back(tmp_path):
    port = free_port()
    config = tools_config(tmp_path, {"web": {"url": f"http://127.0.0.1:{port}/mcp", "recovery": "stateless"}})
    opening = asyncio.create_task(open_toolbox(config))
    with process_of(str(SERVER), "--http", str(port)):
        box = await opening
        assert (await box.call(request("add", a=1, b=1), deadline_s=20)).content == "2"
    down = await box.call(request("add", a=1, b=2), deadline_s=1)
    assert down.status is ToolStatus.CRASHED
    with process_of(str(SERVER), "--http", str(port)):
        results = await asyncio.gather(*(box.call(request("add", a=n, b=1), deadline_s=30) for n in range(50)))
        assert [result.content for result in results] == [str(n + 1) for n in range(50)]
        hung = await box.call(request("hang"), deadline_s=0.3)
        assert hung.status is ToolStatus.TIMEOUT
        await box.close()


async def test_a_result_of_three_megabytes_passes_over_http(tmp_path):
    port = free_port()
    config = tools_config(tmp_path, {"web": {"url": f"http://127.0.0.1:{port}/mcp"}}, max_tool_result_chars=4_000_000)
    with process_of(str(SERVER), "--http", str(port)):
        box = await open_toolbox(config)
        assert (await box.call(request("big", size=3_000_000), deadline_s=30)).content == "x" * 3_000_000
        await box.close()


async def test_a_manager_url_that_only_speaks_sse_is_used_as_sse():
    port = free_port()
    with process_of(str(SERVER), "--sse", str(port)):
        box = await open_toolbox(ToolsConfig(mcp_manager_url=f"http://127.0.0.1:{port}/sse"))
        results = await asyncio.gather(*(box.call(request("add", a=n, b=1), deadline_s=20) for n in range(20)))
        assert [result.content for result in results] == [str(n + 1) for n in range(20)]
        await box.close()


class LegacyEndpoint:
    """An older MCP server over HTTP, with sessions it can forget."""

    def __init__(self):
        self.num_sessions = 0
        self.live = ""

    async def answer(self, http_request):
        message = await http_request.json()
        if message["method"] == "server/discover":
            return self.reply(message, error={"code": -32601, "message": "Method not found"})
        if message["method"] == "initialize":
            self.live = f"session-{self.num_sessions}"
            self.num_sessions += 1
            result = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}
            result["serverInfo"] = {"name": "old", "version": "1"}
            return self.reply(message, result=result, headers={"mcp-session-id": self.live})
        if http_request.headers.get("mcp-session-id") != self.live:
            return web.Response(status=404)
        if "id" not in message:
            return web.Response(status=202)
        if message["method"] == "tools/list":
            return self.reply(message, result={"tools": [{"name": "whoami", "inputSchema": {"type": "object"}}]})
        return self.reply(message, result={"content": [{"type": "text", "text": self.live}]})

    def reply(self, message, *, headers=None, **body):
        return web.json_response({"jsonrpc": "2.0", "id": message["id"], **body}, headers=headers)


async def test_a_session_that_an_older_http_server_forgot_is_opened_anew(tmp_path):
    endpoint = LegacyEndpoint()
    app = web.Application()
    app.router.add_post("/mcp", endpoint.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    servers = {"old": {"url": f"http://127.0.0.1:{port}/mcp", "recovery": "stateless"}}
    box = await open_toolbox(tools_config(tmp_path, servers))
    assert (await box.call(request("whoami"), deadline_s=10)).content == "session-0"
    endpoint.live = "none"
    result = await box.call(request("whoami"), deadline_s=10)
    assert (result.status, result.content) == (ToolStatus.OK, "session-1")
    await box.close()
    await runner.cleanup()


async def test_a_server_that_speaks_garbage_is_named_with_what_it_wrote_and_no_child_is_left(tmp_path):
    servers = {"noisy": {"command": "python", "args": ["-c", STUBBORN]}}
    with pytest.raises(ToolServerError, match="noisy") as caught:
        await open_toolbox(tools_config(tmp_path, servers, tool_connect_timeout_s=2))
    assert "python -c" in str(caught.value)
    assert "Welcome to the tool!" in str(caught.value)
    assert "licence file missing" in str(caught.value)


async def test_a_server_that_exits_at_start_fails_at_once_with_its_last_words(tmp_path):
    script = "import sys; sys.exit('cannot open the licence')"
    servers = {"good": stdio(), "dying": {"command": "python", "args": ["-c", script]}}
    async with asyncio.timeout(20):
        with pytest.raises(ToolServerError, match=r"(?s)'dying' \(python -c .*cannot open the licence"):
            await open_toolbox(tools_config(tmp_path, servers, tool_connect_timeout_s=60))


async def test_a_key_that_a_server_quotes_is_neither_in_messages_nor_in_results(tmp_path):
    key = "planted-key-123"
    script = "import os, sys; sys.exit('bad key ' + os.environ['SEARCH_API_KEY'])"
    with pytest.raises(ToolServerError, match=r"bad key \*\*\*") as caught:
        await open_toolbox(
            tools_config(
                tmp_path, {"dying": {"command": "python", "args": ["-c", script], "env": {"SEARCH_API_KEY": key}}}
            )
        )
    assert key not in str(caught.value)
    (server,) = load_server_configs(tools_config(tmp_path, {"web": {"url": "http://h", "auth_token": key}}))
    assert server.without_secrets(f"HTTP 401: {key} is unknown") == "HTTP 401: *** is unknown"


async def test_a_command_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ToolServerError, match="'typo' \\(no-such-program --fast\\)"):
        await open_toolbox(tools_config(tmp_path, {"typo": {"command": "no-such-program", "args": ["--fast"]}}))


async def test_a_url_where_nobody_listens_is_named_after_the_time_limit(tmp_path):
    config = ToolsConfig(mcp_manager_url=f"http://127.0.0.1:{free_port()}/mcp?key=secret", tool_connect_timeout_s=1)
    with pytest.raises(ToolServerError, match="/mcp\\) did not start: ConnectError") as caught:
        await open_toolbox(config)
    assert "secret" not in str(caught.value)


async def test_a_server_carries_the_mark_of_the_launch_it_belongs_to(tmp_path, monkeypatch):
    monkeypatch.setenv(LAUNCH_MARK, "run.lock#life")
    before = children()
    toolbox = await open_toolbox(tools_config(tmp_path, {"a": stdio(env={"PLACE": "here"})}))
    try:
        (server,) = children() - before
        environment = psutil.Process(server).environ()
        assert (environment[LAUNCH_MARK], environment["PLACE"]) == ("run.lock#life", "here")
    finally:
        await toolbox.close()


async def test_cancelling_the_start_leaves_no_child(tmp_path):
    opening = asyncio.create_task(open_toolbox(tools_config(tmp_path, {"a": stdio(sessions=3)})))
    before = children()
    await wait_until(lambda: len(children() - before) == 3)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening


async def test_a_server_that_ignores_the_end_of_its_input_is_ended_with_its_children(tmp_path):
    wrapper = tmp_path / "wrapper.py"
    wrapper.write_text(
        "import signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"subprocess.run([sys.executable, {str(SERVER)!r}])\n"
        "while True: signal.pause()\n",
        encoding="utf-8",
    )
    box = await open_toolbox(tools_config(tmp_path, {"a": {"command": "python", "args": [str(wrapper)]}}))
    assert (await box.call(request("add", a=1, b=1), deadline_s=10)).content == "2"
    await box.close()


def test_a_toolbox_that_nobody_closed_ends_with_its_event_loop(tmp_path):
    async def use_and_forget():
        box = await open_toolbox(tools_config(tmp_path, {"a": stdio()}))
        return (await box.call(request("add", a=1, b=1), deadline_s=10)).content

    assert asyncio.run(use_and_forget()) == "2"


async def test_no_server_configured_means_no_tools():
    box = await open_toolbox(ToolsConfig())
    assert list(box.list_tools()) == []
    assert (await box.call(request("search"), deadline_s=1)).status is ToolStatus.UNKNOWN_TOOL
    await box.close()


async def test_a_toolbox_without_servers_can_be_opened_directly():
    box = await McpToolbox.open([], connect_timeout_s=1, max_result_chars=100, rng=random.Random(0))
    assert list(box.list_tools()) == []
    await box.close()
