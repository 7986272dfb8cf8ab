"""One HTTP request to a service behind a tool: deadline, retries where they can help, typed failures.

Sent again (with pauses that double, or as long as `Retry-After` says) are connections that failed, 429, 500, 502, 503
and 504. What the service refuses for good is not: 401 and 403 are `auth`, 402 is `quota`, everything else is the
model's request. Keys are in headers only, and no message holds a header.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx2

from agentrl.tools.servers.serving import OperationError

MAX_REPLY_BYTES = 16 * 1024 * 1024
_RETRYABLE = frozenset({429, 500, 502, 503, 504})
_STATUS = {401: "auth", 403: "auth", 402: "quota", 429: "rate_limited"}
_FIRST_ERROR = 400
_MAX_DETAIL_CHARS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A service and how patiently it is asked. `headers` hold its key."""

    name: str
    url: str
    headers: Mapping[str, str] = field(repr=False)
    timeout_s: float = 25.0  # of one request with its retries
    max_retries: int = 3
    first_pause_s: float = 0.5
    status_of: Callable[[int, str], str | None]  # what an HTTP error and its message mean: `status_of_code` or own


class Connector:
    """Asks one service. Made outside any event loop; connections open with the first request."""

    def __init__(self, service: Service, *, rng: random.Random) -> None:
        self._service = service
        self._rng = rng
        self._client: httpx2.AsyncClient | None = None

    async def post(self, body: Mapping[str, Any]) -> Any:
        """The JSON of the reply. Raises OperationError with the status that says who is to blame."""
        try:
            async with asyncio.timeout(self._service.timeout_s):
                return await self._post_patiently(body)
        except TimeoutError:
            message = f"{self._service.name} did not answer within {self._service.timeout_s:g} s"
            raise OperationError(message, status="timeout") from None

    async def _post_patiently(self, body: Mapping[str, Any]) -> Any:
        for attempt in range(self._service.max_retries + 1):
            is_last = attempt == self._service.max_retries
            pause_s = self._service.first_pause_s * 2**attempt * self._rng.uniform(0.75, 1.25)
            try:
                code, retry_after_s, reply = await self._post_once(body)
            except httpx2.TransportError as error:
                if is_last:
                    message = f"{self._service.name} cannot be reached ({type(error).__name__})"
                    raise OperationError(message, status="timeout") from error
            else:
                if code < _FIRST_ERROR:
                    return self._parsed(reply)
                error_met = self._failure(code, reply, retry_after_s=retry_after_s)
                if is_last or code not in _RETRYABLE or error_met.status == "quota":
                    raise error_met
                pause_s = max(pause_s, retry_after_s or 0.0)
                if pause_s > self._service.timeout_s:
                    raise error_met
            await asyncio.sleep(pause_s)
        raise AssertionError("the last attempt returns or raises")

    async def _post_once(self, body: Mapping[str, Any]) -> tuple[int, float | None, bytes]:
        if self._client is None:
            self._client = httpx2.AsyncClient(timeout=self._service.timeout_s, headers=dict(self._service.headers))
        async with self._client.stream("POST", self._service.url, json=dict(body)) as response:
            reply = bytearray()
            async for chunk in response.aiter_bytes():
                reply += chunk
                if len(reply) > MAX_REPLY_BYTES:
                    raise OperationError(f"the reply of {self._service.name} is longer than {MAX_REPLY_BYTES} bytes")
            return response.status_code, _seconds(response.headers.get("retry-after")), bytes(reply)

    def _failure(self, code: int, reply: bytes, *, retry_after_s: float | None) -> OperationError:
        detail = _detail(reply)
        status = self._service.status_of(code, detail)
        shown = f"{self._service.name} answered HTTP {code}" + (f": {detail}" if detail else "")
        return OperationError(shown, status=status, retry_after_s=retry_after_s if status == "rate_limited" else None)

    def _parsed(self, reply: bytes) -> Any:
        try:
            return json.loads(reply)
        except (ValueError, RecursionError) as error:
            raise OperationError(f"{self._service.name} answered what is no JSON") from error


def status_of_code(code: int, _message: str) -> str | None:
    """The status an HTTP error stands for, where the service has no words of its own for it."""
    return _STATUS.get(code)


def cut(text: str, *, max_chars: int) -> str:
    """`text` with at most `max_chars` characters; what is missing is said."""
    return text if len(text) <= max_chars else f"{text[:max_chars]}\n[cut: the text has {len(text)} characters]"


def _detail(reply: bytes) -> str:
    text = reply.decode("utf-8", "replace")
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        body = None
    if isinstance(body, dict):
        text = next(
            (str(body[key]) for key in ("readableMessage", "message", "detail", "error") if body.get(key)), text
        )
    return " ".join(text.split())[:_MAX_DETAIL_CHARS]


def _seconds(retry_after: str | None) -> float | None:
    """Seconds of a Retry-After header; its form as a date is not read."""
    try:
        seconds = float(retry_after or "")
    except ValueError:
        return None
    return seconds if 0.0 <= seconds < float("inf") else None
