"""What a gateway's replies to a call mean. Pure.

A failure comes with an HTTP error status, or with status 200 and a body that says otherwise, in one of two shapes:
`{"status_code": 500, "detail": "..."}` (AgentDock returns its exceptions) or `{"status": "error", "content": ...}`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from agentrl.tools.failures import CallFailedError, failure_of_http_status
from agentrl.tools.requests import shorten
from agentrl.types import ToolResult, ToolStatus

_MAX_DETAIL_CHARS = 2000
_LAST_CLIENT_ERROR = 499
_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
_BAD_ARGUMENTS = re.compile(r"failed validating|is a required property", re.IGNORECASE)
_NOT_FOUND = re.compile(r"tool not found|server not found", re.IGNORECASE)
_MCP_ERROR = "Error executing tool "  # how the MCP SDK begins the text of a tool that raised; the gateway drops isError


def read_call_reply(body: Any, *, http_status: int, retry_after: str | None = None) -> ToolResult:
    """The result a reply holds. Raises CallFailedError where it holds none."""
    fields: Mapping[str, Any] = body if isinstance(body, dict) else {}
    code = fields.get("status_code", http_status)
    code = max(http_status, code if isinstance(code, int) else 0)
    if code >= 400:
        raise _failure(code, _detail(fields) or f"HTTP {code}", retry_after=retry_after)
    content = fields.get("content")
    if "content" not in fields:
        raise CallFailedError("the gateway's reply has no content", status=ToolStatus.CRASHED)
    if fields.get("status") == "error" or (isinstance(content, dict) and "error" in content):
        return _tool_error(_detail(fields) or _as_text(content))
    if content == {}:
        return _tool_error("Tool returned empty content")
    text = _as_text(content)
    return _tool_error(text) if text.startswith(_MCP_ERROR) else ToolResult(status=ToolStatus.OK, content=text)


def _failure(code: int, detail: str, *, retry_after: str | None) -> CallFailedError:
    access = failure_of_http_status(code, detail, retry_after=retry_after)
    if access is not None:
        return access
    if code in (408, 504) or _TIMED_OUT.search(detail):
        return CallFailedError(detail, status=ToolStatus.TIMEOUT)
    if code in (400, 422) or _BAD_ARGUMENTS.search(detail):
        return CallFailedError(detail, status=ToolStatus.BAD_ARGUMENTS, was_refused=True)
    if code <= _LAST_CLIENT_ERROR or _NOT_FOUND.search(detail):
        return CallFailedError(detail, status=ToolStatus.TOOL_ERROR)
    if code in (502, 503):  # what stands before the gateway could not reach it
        return CallFailedError(detail, status=ToolStatus.CRASHED)
    return CallFailedError(detail, status=ToolStatus.TOOL_ERROR)


def _tool_error(text: str) -> ToolResult:
    return ToolResult(status=ToolStatus.TOOL_ERROR, content=text, error=text)


def _detail(fields: Mapping[str, Any]) -> str:
    """The most telling words of a failed reply, nothing lost: what the model needs to do better."""
    content = fields.get("content")
    inner: Mapping[str, Any] = content if isinstance(content, dict) else {}
    words = [inner.get("error"), inner.get("detail"), fields.get("detail")]
    texts = dict.fromkeys(_as_text(part) for part in words if part)
    rest = {key: value for key, value in inner.items() if key not in ("error", "detail", "status") and value}
    text = ": ".join(texts) + (f"\n{json.dumps(rest, ensure_ascii=False)}" if rest else "")
    return shorten(text, limit=_MAX_DETAIL_CHARS)


def _as_text(content: Any) -> str:
    """Text as it is, several items in order, anything else as JSON."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content and all(isinstance(item, dict) and "type" in item for item in content):
        return "\n".join(_item_text(item) for item in content)
    return json.dumps(content, ensure_ascii=False)


def _item_text(item: Mapping[str, Any]) -> str:
    if item["type"] == "text":
        return _as_text(item.get("text", ""))
    if item["type"] in ("image_url", "image"):
        return f"[Image: {_mime_type(item)}]"
    return f"[{str(item['type']).capitalize()}]"


def _mime_type(item: Mapping[str, Any]) -> str:
    url = item.get("image_url", item.get("data", ""))
    url = url.get("url", "") if isinstance(url, dict) else url
    match = re.match(r"data:([\w.+-]+/[\w.+-]+)", url) if isinstance(url, str) else None
    return match[1] if match else str(item.get("mimeType", "image"))
