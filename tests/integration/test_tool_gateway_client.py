"""The /mcpapi gateway as a tool source, against a stand-in of it on loopback that answers as AgentDock does."""

import asyncio
import json

import pytest
from aiohttp import web

from agentrl.config import ToolsConfig
from agentrl.errors import ToolServerError
from agentrl.tools import open_toolbox
from agentrl.types import ToolRequest, ToolStatus
from left_behind import expect_nothing_left_behind
from refusing_endpoint import served

SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}


@pytest.fixture(autouse=True)
async def nothing_is_left_behind():
    with expect_nothing_left_behind():
        yield


class Dock:
    """The gateway: two servers that both have a `search`, and one that is listed and then gone."""

    def __init__(self):
        self.tools = {"web": ["search", "fetch"], "wiki": ["search"]}
        self.replies = {}
        self.calls = []
        self.tokens = set()
        self.released = asyncio.Event()

    def app(self):
        app = web.Application()
        app.router.add_get("/mcpapi/servers", self.servers)
        app.router.add_get("/mcpapi/server/{id}/tools", self.tools_of)
        app.router.add_post("/mcpapi/tool/{name}", self.call)
        return app

    async def servers(self, request):
        self.tokens.add(request.headers.get("authorization"))
        return web.json_response({"servers": [*self.tools, "gone"]})

    async def tools_of(self, request):
        server = request.match_info["id"]
        if server not in self.tools:
            return web.json_response({"detail": "Server not found"}, status=404)
        functions = [
            {"type": "function", "function": {"name": name, "description": f"{name}.", "parameters": SCHEMA}}
            for name in self.tools[server]
        ]
        return web.json_response({"server": server, "tools": functions})

    async def call(self, request):
        name, arguments = request.match_info["name"], await request.json()
        self.calls.append((name, arguments))
        reply = self.replies.get(name, {"content": f"{name}: {arguments['q']}"})
        if reply == "hang":
            await self.released.wait()
        if isinstance(reply, web.Response):
            return web.Response(status=reply.status, text=reply.text, headers=reply.headers)
        return web.json_response(reply)


def search(name, q="x"):
    return ToolRequest(call_id="1", name=name, arguments={"q": q})


async def open_dock(url, **settings):
    return await open_toolbox(ToolsConfig(mcp_manager_url=f"{url}/mcpapi", tool_connect_timeout_s=10, **settings))


async def test_the_tools_of_all_servers_are_listed_and_called_with_names_that_tell_them_apart():
    dock = Dock()
    async with served(dock.app()) as url:
        box = await open_dock(url, mcp_auth_token="t")
        assert [(spec.name, spec.server) for spec in box.list_tools()] == [
            ("web.search", "web"),
            ("fetch", "web"),
            ("wiki.search", "wiki"),
        ]
        results = [await box.call(search(name, "é"), deadline_s=10) for name in ("web.search", "fetch", "wiki.search")]
        await box.close()
    assert [result.content for result in results] == ["web.search: é", "web.fetch: é", "wiki.search: é"]
    assert [name for name, _ in dock.calls] == ["web.search", "web.fetch", "wiki.search"]
    assert dock.tokens == {"Bearer t"}


async def test_only_the_chosen_servers_tools_are_exposed():
    async with served(Dock().app()) as url:
        box = await open_dock(url, mcp_server_name="wiki")
        assert [spec.name for spec in box.list_tools()] == ["search"]
        await box.close()
        with pytest.raises(ToolServerError, match="has no server 'nope'; it has: web, wiki, gone"):
            await open_dock(url, mcp_server_name="nope")


async def test_wrong_arguments_never_reach_the_gateway():
    dock = Dock()
    async with served(dock.app()) as url:
        box = await open_dock(url)
        result = await box.call(ToolRequest(call_id="1", name="fetch", arguments={}), deadline_s=10)
        await box.close()
    assert (result.status, dock.calls) == (ToolStatus.BAD_ARGUMENTS, [])


@pytest.mark.parametrize(
    ("reply", "status", "said"),
    [
        ({"status_code": 500, "detail": "Tool call timed out after 180 s"}, ToolStatus.TIMEOUT, "after 180 s"),
        ({"status": "error", "content": {"error": "no index"}}, ToolStatus.TOOL_ERROR, "no index"),
        (web.Response(status=401, text="who are you"), ToolStatus.AUTH, "who are you"),
        (web.Response(status=402), ToolStatus.QUOTA, "HTTP 402"),
        (web.Response(status=429, headers={"Retry-After": "99"}), ToolStatus.RATE_LIMITED, "HTTP 429"),
        (web.Response(status=200, text="<html>"), ToolStatus.CRASHED, "no content"),
        (web.Response(status=200, text="[" * 100_000), ToolStatus.CRASHED, "no content"),
        (
            web.Response(status=200, text='{"content": ' + "[" * 980 + "]" * 980 + "}"),
            ToolStatus.CRASHED,
            "no content",
        ),
        (web.Response(status=422, text=json.dumps({"detail": "q is odd"})), ToolStatus.BAD_ARGUMENTS, "q is odd"),
    ],
)
async def test_every_failure_of_the_gateway_is_typed_and_its_words_reach_the_model(reply, status, said):
    dock = Dock()
    dock.replies["web.fetch"] = reply
    async with served(dock.app()) as url:
        box = await open_dock(url)
        result = await box.call(search("fetch"), deadline_s=5)
        await box.close()
    assert result.status is status
    assert said in result.content
    assert said in result.error


async def test_a_tool_that_hangs_ends_at_its_deadline_and_cancelled_calls_leave_nothing():
    dock = Dock()
    dock.replies["web.fetch"] = "hang"
    async with served(dock.app()) as url:
        box = await open_dock(url, tool_timeout_s=20)
        assert (await box.call(search("fetch"), deadline_s=0.2)).status is ToolStatus.TIMEOUT
        calls = [asyncio.create_task(box.call(search("fetch"), deadline_s=20)) for _ in range(30)]
        assert (await box.call(search("web.search"), deadline_s=0.3)).status in {ToolStatus.OK, ToolStatus.TIMEOUT}
        for call in calls[:10]:
            call.cancel()
        await asyncio.wait(calls[:10], timeout=5)
        assert all(call.cancelled() for call in calls[:10])
        await box.close()
        done, _ = await asyncio.wait(calls[10:], timeout=5)
        assert {call.result().status for call in done} == {ToolStatus.CANCELLED}
        assert len(done) == 20
        dock.released.set()


async def test_a_gateway_that_went_away_is_crashed_and_one_that_never_was_is_named():
    dock = Dock()
    async with served(dock.app()) as url:
        box = await open_dock(url)
    result = await box.call(search("fetch"), deadline_s=3)
    assert result.status is ToolStatus.CRASHED
    await box.close()
    with pytest.raises(ToolServerError, match=r"gateway 'manager' .* did not start: ConnectError"):
        await open_toolbox(ToolsConfig(mcp_manager_url=f"{url}/mcpapi", tool_connect_timeout_s=0.5))


async def test_a_url_that_is_no_gateway_is_refused_at_the_start():
    app = web.Application()
    app.router.add_get("/mcpapi/servers", lambda request: _json({"hello": 1}))
    async with served(app) as url:
        with pytest.raises(ToolServerError, match="it is no gateway"):
            await open_dock(url)


async def _json(content):
    return web.json_response(content)
