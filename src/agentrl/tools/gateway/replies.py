"""A ToolResult as a reply of `/mcpapi` (AgentDock's protocol) and of MCP. Pure.

A failure of `/mcpapi` has an HTTP error status, and a body that clients which only look at the body take for an error
in either of the two shapes they know: {"status": "error", "content": {"error", "detail"}, "status_code", "detail"}.
Known clients send a 5xx again: only calls that may be repeated get one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import mcp_types as types

from agentrl.tools.result_meta import STATUS_META
from agentrl.types import Recovery, ToolResult, ToolSpec, ToolStatus, why_unusable

HTTP_OK = 200
_FAILED_DEPENDENCY = 424
_FIRST_SERVER_ERROR = 500
_HTTP_STATUS = {
    "tool_error": _FAILED_DEPENDENCY,
    "bad_arguments": 422,
    "unknown_tool": 404,
    "malformed": 400,
    "rate_limited": 429,
    "quota": 402,
    "auth": 403,  # the tool server refused the gateway; 401 would say that the client's token is wrong
    "timeout": 504,
    "crashed": 502,
    "cancelled": 503,
    "not_recorded": _FAILED_DEPENDENCY,
    "over_limit": _FAILED_DEPENDENCY,
}


def http_status(result: ToolResult, *, spec: ToolSpec | None) -> int:
    """The HTTP status of a call's reply."""
    if result.status is ToolStatus.OK:
        return HTTP_OK
    status = _HTTP_STATUS[result.status]
    may_repeat = spec is None or spec.recovery is Recovery.STATELESS
    return status if may_repeat or status < _FIRST_SERVER_ERROR else _FAILED_DEPENDENCY


def call_body(result: ToolResult, *, spec: ToolSpec | None) -> dict[str, Any]:
    """The JSON body of a call's reply."""
    if result.status is ToolStatus.OK:
        return {"content": [_api_item(item) for item in result.items] or _decoded(result.content)}
    message = result.error or result.content
    return error_body(message, status_code=http_status(result, spec=spec), kind=result.status)


def error_body(message: str, *, status_code: int, kind: str) -> dict[str, Any]:
    """The body of every reply that is no success; `agentrl_status` is the typed reason."""
    message = _sendable(message)
    return {
        "status": "error",
        "content": {"error": message, "detail": message},
        "status_code": status_code,
        "detail": message,
        "agentrl_status": str(kind),
    }


def mcp_result(result: ToolResult) -> types.CallToolResult:
    """The same for MCP, with all items and structured content as the tool gave them.

    Failures keep `isError`, with the typed reason in `_meta`.
    """
    is_error = result.status is not ToolStatus.OK
    fields: dict[str, Any] = {"isError": is_error}
    fields["content"] = list(result.items) or [{"type": "text", "text": _sendable(result.content)}]
    if result.structured is not None:
        fields["structuredContent"] = result.structured
    if is_error:
        fields["_meta"] = {STATUS_META: str(result.status)}
    return types.CallToolResult.model_validate(fields)


def _api_item(item: Mapping[str, Any]) -> dict[str, Any]:
    """One of several items, as clients of `/mcpapi` know them: an image is a data URL."""
    if item["type"] != "image":
        return dict(item)
    return {"type": "image_url", "image_url": {"url": f"data:{item['mimeType']};base64,{item['data']}"}}


def _decoded(text: str) -> Any:
    """JSON text decoded, as clients of this protocol expect; what they would then take for an error stays text."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return text
    if why_unusable(value) is not None:
        return text
    is_taken_for_error = isinstance(value, dict) and (not value or "error" in value or value.get("status") == "error")
    return text if is_taken_for_error else value


def _sendable(text: str) -> str:
    """Text without lone surrogates, which a request may hold in JSON and no reply can."""
    return text.encode("utf-8", "replace").decode("utf-8")
