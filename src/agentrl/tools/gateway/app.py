"""The gateway's endpoints as one ASGI application.

/mcp                            streamable HTTP, all tools
/mcpapi/servers                 {"servers": [id, ...]}
/mcpapi/tools                   {"tools": [OpenAI function named server.tool, ...]}
/mcpapi/server/{id}/tools       {"server": id, "tools": [OpenAI function with its bare name, ...]}
/mcpapi/tool/{server.tool}      POST the arguments object; replies: replies.py
/health                         whether it serves, without a token; /metrics: Prometheus text
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

import mcp_types as types
from mcp.server import ServerRequestContext
from mcp.server.lowlevel import Server
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from agentrl.protocols import Toolbox
from agentrl.tools.gateway.calls import GatewayBusyError, GatewayCalls, GatewayLimits, qualified_name
from agentrl.tools.gateway.guard import HEALTH_PATH, RequestGuard
from agentrl.tools.gateway.metrics import CONTENT_TYPE, GatewayMetrics
from agentrl.tools.gateway.replies import call_body, error_body, http_status, mcp_result
from agentrl.tools.guard import BreakerState
from agentrl.tools.result_meta import RETRY_META, STATUS_META
from agentrl.types import ToolResult

MCP_PATH = "/mcp"
API_PATH = "/mcpapi"
_BUSY_RETRY_S = 1
_TOOLBOX = "agentrl.toolbox"
_CLIENT_GONE, _TOO_MANY, _NOT_FOUND, _BAD_REQUEST = 499, 429, 404, 400


Breakers = Callable[[], Mapping[str, BreakerState]]


def gateway_app(
    toolbox: Toolbox, *, token: str | None, limits: GatewayLimits, host: str, breakers: Breakers = dict
) -> RequestGuard:
    """The application over an open toolbox, to be served in the event loop that opened it."""
    metrics = GatewayMetrics()
    endpoints = _Endpoints(GatewayCalls(toolbox, limits=limits, metrics=metrics), metrics, breakers=breakers)
    server: Server[Any] = Server(
        "agentrl-gateway", on_list_tools=endpoints.mcp_list_tools, on_call_tool=endpoints.mcp_call_tool
    )
    app = server.streamable_http_app(
        streamable_http_path=MCP_PATH,
        json_response=True,
        max_request_body_size=limits.max_body_bytes,
        session_idle_timeout=limits.session_idle_s,
        host=host,
        custom_starlette_routes=[
            Route(HEALTH_PATH, endpoints.health),
            Route("/metrics", endpoints.metrics),
            Route(f"{API_PATH}/servers", endpoints.list_servers),
            Route(f"{API_PATH}/tools", endpoints.list_tools),
            Route(f"{API_PATH}/server/{{server:path}}/tools", endpoints.list_server_tools),
            Route(f"{API_PATH}/tool/{{tool:path}}", endpoints.call_tool, methods=["POST"]),
        ],
    )
    app.router.redirect_slashes = False  # a call must not be answered by a redirect
    return RequestGuard(app, token=token, limits=limits, metrics=metrics)


class _Endpoints:
    def __init__(self, calls: GatewayCalls, metrics: GatewayMetrics, *, breakers: Breakers) -> None:
        self._calls = calls
        self._metrics = metrics
        self._breakers = breakers

    # --- MCP ---

    async def mcp_list_tools(self, _context: Any, _params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(
            tools=[
                types.Tool(name=spec.name, description=spec.description, input_schema=dict(spec.parameters))
                for spec in self._calls.specs
            ]
        )

    async def mcp_call_tool(
        self, context: ServerRequestContext[Any, Any], params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        toolbox = await self._session_toolbox(context)
        try:
            return mcp_result(await self._calls.call(params.name, params.arguments or {}, toolbox=toolbox))
        except GatewayBusyError as error:
            meta = {STATUS_META: "rate_limited", RETRY_META: _BUSY_RETRY_S}
            content = [{"type": "text", "text": f"error: {error}"}]
            return types.CallToolResult.model_validate({"content": content, "isError": True, "_meta": meta})

    async def _session_toolbox(self, context: ServerRequestContext[Any, Any]) -> Toolbox | None:
        """What belongs to the client's session, ended with it; None for a request without one (revision 2026)."""
        connection = context.session._connection  # the SDK shows it to nobody but handlers of its high-level server
        if connection.session_id is None:
            return None
        if _TOOLBOX not in connection.state:
            entered = await connection.exit_stack.enter_async_context(self._calls.for_session())
            connection.state[_TOOLBOX] = entered
        toolbox: Toolbox = connection.state[_TOOLBOX]
        return toolbox

    # --- /mcpapi ---

    async def list_servers(self, _request: Request) -> Response:
        return JSONResponse({"servers": self._calls.servers})

    async def list_tools(self, _request: Request) -> Response:
        functions = [_function(spec.as_openai(), name=qualified_name(spec)) for spec in self._calls.specs]
        return JSONResponse({"tools": functions})

    async def list_server_tools(self, request: Request) -> Response:
        server = request.path_params["server"]
        if server not in self._calls.servers:
            message = f"Server not found: {server}"
            return JSONResponse(
                error_body(message, status_code=_NOT_FOUND, kind="unknown_server"), status_code=_NOT_FOUND
            )
        functions = [
            _function(spec.as_openai(), name=qualified_name(spec).removeprefix(f"{server}."))
            for spec in self._calls.specs
            if spec.server == server
        ]
        return JSONResponse({"server": server, "tools": functions})

    async def call_tool(self, request: Request) -> Response:
        try:
            arguments = json.loads(await request.body() or b"{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            self._metrics.count_refused("malformed")
            body = error_body("the body must be a JSON object", status_code=_BAD_REQUEST, kind="malformed")
            return JSONResponse(body, status_code=_BAD_REQUEST)
        name = request.path_params["tool"]
        try:
            result = await self._call_while_connected(request, name=name, arguments=arguments)
        except GatewayBusyError as error:
            body = error_body(str(error), status_code=_TOO_MANY, kind="rate_limited")
            return JSONResponse(body, status_code=_TOO_MANY, headers={"Retry-After": str(_BUSY_RETRY_S)})
        if result is None:
            return Response(status_code=_CLIENT_GONE)  # for the server's own log: nobody reads it
        spec = self._calls.find(name)
        return JSONResponse(call_body(result, spec=spec), status_code=http_status(result, spec=spec))

    async def _call_while_connected(
        self, request: Request, *, name: str, arguments: Mapping[str, Any]
    ) -> ToolResult | None:
        """The call's result; None, with the call cancelled, if the client leaves: nothing works on for nobody."""
        call = asyncio.create_task(self._calls.call(name, arguments))
        gone = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait({call, gone}, return_when=asyncio.FIRST_COMPLETED)
            return call.result() if call.done() else None
        finally:
            for task in (call, gone):
                task.cancel()
            await asyncio.gather(call, gone, return_exceptions=True)

    # --- operations ---

    async def health(self, _request: Request) -> Response:
        servers = {name: self._metrics.failures_in_a_row(name) for name in self._calls.servers}
        breakers = {name: state for name, state in self._breakers().items() if state is not BreakerState.CLOSED}
        status = "degraded" if breakers or any(servers.values()) else "ok"
        return JSONResponse({"status": status, "failures_in_a_row": servers, "breakers": breakers})

    async def metrics(self, _request: Request) -> Response:
        text = self._metrics.render(
            in_flight=self._calls.in_flight, waiting=self._calls.waiting, breakers=self._breakers()
        )
        return PlainTextResponse(text, headers={"content-type": CONTENT_TYPE})


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _function(tool: Mapping[str, Any], *, name: str) -> dict[str, Any]:
    return {**tool, "function": {**tool["function"], "name": name}}
