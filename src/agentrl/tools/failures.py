"""Why a call failed, as a ToolStatus: read from what servers send, never guessed from a tool's own text.

What counts, in this order: an HTTP status (401 and 403 auth, 402 quota, 429 rate_limited), a status a server puts into
its result's `_meta` under `agentrl/status`, an HTTP-like number in a protocol error, the words of a protocol error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import httpx2
import mcp_types as types
from mcp import MCPError

from agentrl.tools.requests import shorten
from agentrl.tools.result_meta import RETRY_META, STATUS_META
from agentrl.types import ToolStatus

_MAX_MESSAGE_CHARS = 500
_HTTP_STATUS = {
    401: ToolStatus.AUTH,
    402: ToolStatus.QUOTA,
    403: ToolStatus.AUTH,
    429: ToolStatus.RATE_LIMITED,
}
_STATUS_KEYS = ("http_status", "status_code", "status")
_ERROR_CODES = {
    types.INVALID_PARAMS: ToolStatus.BAD_ARGUMENTS,
    types.PARSE_ERROR: ToolStatus.CRASHED,  # the SDK's word for an answer that is no JSON-RPC
    types.REQUEST_TIMEOUT: ToolStatus.TIMEOUT,
}
_WORDS = (
    (re.compile(r"rate.?limit|too many requests", re.IGNORECASE), ToolStatus.RATE_LIMITED),
    (re.compile(r"quota|insufficient (credit|balance)|payment required", re.IGNORECASE), ToolStatus.QUOTA),
    (re.compile(r"unauthori[sz]ed|forbidden|invalid (api.?key|token)", re.IGNORECASE), ToolStatus.AUTH),
)
_META_STATUSES = frozenset({ToolStatus.RATE_LIMITED, ToolStatus.QUOTA, ToolStatus.AUTH, ToolStatus.TIMEOUT})


class CallFailedError(Exception):
    """A call without a result. `was_refused`: the server certainly did not run it, so any tool may be asked again."""

    def __init__(
        self, message: str, *, status: ToolStatus, was_refused: bool = False, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.was_refused = was_refused
        self.retry_after_s = retry_after_s


def failure_of_http_status(code: object, message: str, *, retry_after: str | None = None) -> CallFailedError | None:
    """The failure an HTTP status stands for; None if it says nothing about access."""
    status = _HTTP_STATUS.get(code) if isinstance(code, int) else None
    if status is None:
        return None
    is_limit = status is ToolStatus.RATE_LIMITED
    return CallFailedError(
        message, status=status, was_refused=True, retry_after_s=_seconds(retry_after) if is_limit else None
    )


def failure_of_error(error: BaseException) -> CallFailedError:
    """What a failed SDK call means. An exception that is no protocol error is an answer that is no tool result."""
    message = shorten(f"{type(error).__name__}: {error}", limit=_MAX_MESSAGE_CHARS)
    if isinstance(error, httpx2.HTTPStatusError):
        code = error.response.status_code
        return failure_of_http_status(code, f"HTTP {code}") or CallFailedError(message, status=ToolStatus.CRASHED)
    if not isinstance(error, MCPError):
        return CallFailedError(message, status=ToolStatus.CRASHED)
    text = shorten(error.message, limit=_MAX_MESSAGE_CHARS)
    content: Mapping[str, Any] = error.data if isinstance(error.data, dict) else {}
    for candidate in (error.code, *(content.get(key) for key in _STATUS_KEYS)):
        known = failure_of_http_status(candidate, text, retry_after=str(content.get("retry_after", "")))
        if known is not None:
            return known
    if error.code in _ERROR_CODES:
        status = _ERROR_CODES[error.code]
        return CallFailedError(text, status=status, was_refused=status is ToolStatus.BAD_ARGUMENTS)
    for words, status in _WORDS:
        if words.search(error.message):
            return CallFailedError(text, status=status, was_refused=True)
    return CallFailedError(text, status=ToolStatus.TOOL_ERROR)


def failure_of_meta(meta: Mapping[str, Any] | None, message: str) -> CallFailedError | None:
    """The failure a server declares in the `_meta` of an isError result; None if it declares none."""
    declared = (meta or {}).get(STATUS_META)
    if not isinstance(declared, str) or declared not in _META_STATUSES:
        return None
    status = ToolStatus(declared)
    retry_after_s = _seconds(str((meta or {}).get(RETRY_META, "")))
    return CallFailedError(
        message, status=status, was_refused=status is ToolStatus.RATE_LIMITED, retry_after_s=retry_after_s
    )


def _seconds(text: str | None) -> float | None:
    """A `Retry-After` in seconds; the date form, and anything odd, is None."""
    try:
        seconds = float(text or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None
