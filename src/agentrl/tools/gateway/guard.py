"""Stands before the gateway's endpoints: token, origin, size of requests, clients that send or read too slowly."""

from __future__ import annotations

import asyncio
import hmac

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentrl.tools.gateway.calls import GatewayLimits
from agentrl.tools.gateway.metrics import GatewayMetrics
from agentrl.tools.gateway.replies import error_body

HEALTH_PATH = "/health"
_UNAUTHORIZED, _FORBIDDEN, _TIMEOUT, _TOO_LARGE = 401, 403, 408, 413


class RequestGuard:
    """ASGI middleware: a request reaches `app` whole, in time and with the right token, or not at all."""

    def __init__(self, app: ASGIApp, *, token: str | None, limits: GatewayLimits, metrics: GatewayMetrics) -> None:
        self._app = app
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._limits = limits
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, or pass on the events of the process."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        if b"origin" in headers:  # a web page: no tool is for those
            await self._refuse(_FORBIDDEN, "requests of web pages are refused", "origin", scope, receive, send)
        elif scope["path"] != HEALTH_PATH and not self._has_token(headers.get(b"authorization", b"")):
            await self._refuse(_UNAUTHORIZED, "a valid bearer token is needed", "auth", scope, receive, send)
        else:
            await self._pass_on(scope, receive, send)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await self._read_body(scope, receive)
        except TimeoutError:
            message = f"the request did not arrive within {self._limits.body_timeout_s:g} s"
            await self._refuse(_TIMEOUT, message, "slow", scope, receive, send)
            return
        except _TooLargeError:
            message = f"the request is larger than {self._limits.max_body_bytes} bytes"
            await self._refuse(_TOO_LARGE, message, "size", scope, receive, send)
            return
        if body is None:
            return  # the client left before its request was complete
        is_delivered = False

        async def receive_again() -> Message:
            nonlocal is_delivered
            if is_delivered:
                return await receive()
            is_delivered = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(self._limits.send_timeout_s):
                await send(message)

        try:
            await self._app(scope, receive_again, send_in_time)
        except TimeoutError:
            self._metrics.count_refused("slow")
            raise

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes | None:
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._limits.max_body_bytes:
            raise _TooLargeError
        body = bytearray()
        async with asyncio.timeout(self._limits.body_timeout_s):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    return None
                body += message.get("body", b"")
                if len(body) > self._limits.max_body_bytes:
                    raise _TooLargeError
                if not message.get("more_body", False):
                    return bytes(body)

    def _has_token(self, given: bytes) -> bool:
        return self._expected is None or hmac.compare_digest(given, self._expected)

    async def _refuse(self, status: int, message: str, reason: str, scope: Scope, receive: Receive, send: Send) -> None:
        self._metrics.count_refused(reason)
        headers = {"Connection": "close"} | ({"WWW-Authenticate": "Bearer"} if status == _UNAUTHORIZED else {})
        body = error_body(message, status_code=status, kind=reason)
        await JSONResponse(body, status_code=status, headers=headers)(scope, receive, send)


class _TooLargeError(Exception):
    """More was sent than a request may have."""
