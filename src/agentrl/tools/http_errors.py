"""Keeps what an HTTP request of one tool call met with from being lost, or from ending all calls of the session.

The SDK replaces an HTTP error by "Server returned an error response", and a connection that breaks under one request
ends the session with every call in flight. But a JSON-RPC error in the body of an HTTP error goes to the caller of that
very request. So both get such a body here: a refusal (401, 402, 403, 429) with its status and `Retry-After`, a broken
connection as `CONNECTION_CLOSED`.
"""

from __future__ import annotations

import json
from typing import Any

import httpx2
import mcp_types as types

_REFUSALS = frozenset({401, 402, 403, 429})
_TOOL_CALL = b'"tools/call"'  # no other message we send carries text of somebody else


class CallErrorTransport(httpx2.AsyncHTTPTransport):
    """The network, with refusals of requests and broken connections of tool calls told as JSON-RPC errors."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send one request."""
        try:
            response = await super().handle_async_request(request)
        except httpx2.TransportError as error:
            if request.method != "POST" or _TOOL_CALL not in request.content:
                raise  # whoever connects, or looks after the session, has to know
            return _error_response(502, types.CONNECTION_CLOSED, f"{type(error).__name__}: {error}", detail=None)
        if request.method != "POST" or response.status_code not in _REFUSALS:
            return response
        await response.aclose()
        code = response.status_code
        detail = {"http_status": code, "retry_after": response.headers.get("retry-after", "")}
        message = f"HTTP {code} {httpx2.codes.get_reason_phrase(code)}"
        return _error_response(code, types.INTERNAL_ERROR, message, detail=detail)


def _error_response(http_status: int, code: int, message: str, *, detail: Any) -> httpx2.Response:
    error = {"code": code, "message": message, "data": detail}
    return httpx2.Response(
        http_status,
        headers={"content-type": "application/json"},
        content=json.dumps({"jsonrpc": "2.0", "id": None, "error": error}).encode("ascii"),
    )
