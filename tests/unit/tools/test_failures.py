import httpx2
import mcp_types as types
import pytest
from mcp import MCPError

from agentrl.tools.failures import failure_of_error, failure_of_meta
from agentrl.types import ToolStatus


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (MCPError(429, "slow down"), ToolStatus.RATE_LIMITED),
        (MCPError(types.INTERNAL_ERROR, "HTTP 401 Unauthorized", {"http_status": 401}), ToolStatus.AUTH),
        (MCPError(types.INTERNAL_ERROR, "no", {"status_code": 402}), ToolStatus.QUOTA),
        (MCPError(-32050, "Too Many Requests"), ToolStatus.RATE_LIMITED),
        (MCPError(-32050, "monthly quota exceeded"), ToolStatus.QUOTA),
        (MCPError(-32050, "invalid API key"), ToolStatus.AUTH),
        (MCPError(types.INVALID_PARAMS, "a is missing"), ToolStatus.BAD_ARGUMENTS),
        (MCPError(types.REQUEST_TIMEOUT, "took too long"), ToolStatus.TIMEOUT),
        (MCPError(types.PARSE_ERROR, "Failed to parse JSON response"), ToolStatus.CRASHED),
        (MCPError(types.INTERNAL_ERROR, "division by zero"), ToolStatus.TOOL_ERROR),
        (MCPError(types.INTERNAL_ERROR, "odd", {"status": True}), ToolStatus.TOOL_ERROR),
        (RuntimeError("structured content does not match"), ToolStatus.CRASHED),
    ],
)
def test_an_error_of_the_protocol_is_typed_by_what_it_says(error, status):
    failed = failure_of_error(error)
    assert failed.status is status
    assert str(failed)


def test_an_http_error_of_the_transport_is_typed_by_its_status():
    request = httpx2.Request("GET", "http://h/sse")
    error = httpx2.HTTPStatusError("no", request=request, response=httpx2.Response(403, request=request))
    assert failure_of_error(error).status is ToolStatus.AUTH


@pytest.mark.parametrize(("text", "seconds"), [("3", 3.0), ("", None), ("-1", None), ("inf", None), ("soon", None)])
def test_the_pause_a_server_asks_for_is_kept_if_it_is_a_number_of_seconds(text, seconds):
    failed = failure_of_error(MCPError(1, "x", {"http_status": 429, "retry_after": text}))
    assert failed.retry_after_s == seconds


def test_a_result_may_declare_its_status_but_only_one_of_access_or_time():
    declared = failure_of_meta({"agentrl/status": "rate_limited", "agentrl/retry_after_s": 2}, "busy")
    assert (declared.status, declared.retry_after_s, str(declared)) == (ToolStatus.RATE_LIMITED, 2, "busy")
    assert failure_of_meta({"agentrl/status": "ok"}, "x") is None
    assert failure_of_meta({"agentrl/status": ["auth"]}, "x") is None
    assert failure_of_meta(None, "x") is None
