"""Keeps what an HTTP request of one tool call met with from being lost, or from ending all calls of the session.

The SDK replaces an HTTP error by "Server returned an error response", and a connection that breaks under one request
ends the session with every call in flight. But a JSON-RPC error in the body of an HTTP error goes to the caller of that
very request. So both get such a body here: a refusal (401, 402, 403, 429) with its status and `Retry-After`, a broken
connection as `CONNECTION_CLOSED`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import mcp_types as types

MAX_REPLY_BYTES = 16 * 1024 * 1024
PLAIN_BODIES = {"Accept-Encoding": "identity"}
"""Sent with every request: a compressed body says nothing about how large it will be."""
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
            return _bounded(response)
        await response.aclose()
        code = response.status_code
        detail = {"http_status": code, "retry_after": response.headers.get("retry-after", "")}
        message = f"HTTP {code} {httpx2.codes.get_reason_phrase(code)}"
        return _error_response(code, types.INTERNAL_ERROR, message, detail=detail)


class _BoundedStream(httpx2.AsyncByteStream):
    """The body of a reply, up to `MAX_REPLY_BYTES`. Raises ReadError for more."""

    def __init__(self, inner: httpx2.AsyncByteStream) -> None:
        self._inner = inner

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_bytes = 0
        async for chunk in self._inner:
            num_bytes += len(chunk)
            if num_bytes > MAX_REPLY_BYTES:
                raise httpx2.ReadError(f"the reply is longer than {MAX_REPLY_BYTES} bytes")
            yield chunk

    async def aclose(self) -> None:
        """Close the connection, or give it back."""
        await self._inner.aclose()


def _bounded(response: httpx2.Response) -> httpx2.Response:
    """The reply with a body that ends; a stream of events does not have to, the SDK bounds each of them.

    One that is compressed all the same is left as it came, which is then no JSON.
    """
    response.headers.pop("content-encoding", None)
    is_events = response.headers.get("content-type", "").startswith("text/event-stream")
    if not is_events and isinstance(response.stream, httpx2.AsyncByteStream):
        response.stream = _BoundedStream(response.stream)
    return response


def _error_response(http_status: int, code: int, message: str, *, detail: Any) -> httpx2.Response:
    error = {"code": code, "message": message, "data": detail}
    return httpx2.Response(
        http_status,
        headers={"content-type": "application/json"},
        content=json.dumps({"jsonrpc": "2.0", "id": None, "error": error}).encode("ascii"),
    )
