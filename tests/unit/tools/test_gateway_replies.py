"""AgentDock's replies to a call, as a compatible client must read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.tools.failures import CallFailedError
from agentrl.tools.gateway_replies import read_call_reply
from agentrl.types import ToolStatus

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("some text", "some text"),
        (2024, "2024"),
        (None, "null"),
        ([], "[]"),
        ({"hits": ["é"]}, '{"hits": ["é"]}'),
        ([{"type": "text", "text": "a"}, PICTURE, {"type": "text", "text": "b"}], "a\n[Image: image/png]\nb"),
        ([{"url": "u"}], '[{"url": "u"}]'),
        # A Python tool that only warned: the gateway says error, there is none, and its output is what there is.
        ({"status": "error", "output": "DeprecationWarning"}, '{"status": "error", "output": "DeprecationWarning"}'),
    ],
)
def test_a_reply_with_content_is_a_result(content, text):
    result = read_call_reply({"content": content}, http_status=200)
    assert (result.status, result.content, result.error) == (ToolStatus.OK, text, None)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"content": "Error executing tool search: no index"}, "no index"),
        ({"content": {"status": "error", "error": "NameError: x"}}, "NameError: x"),
        ({"content": {"error": "exit 1", "output": "partial"}}, "partial"),
        ({"status": "error", "content": "broken"}, "broken"),
        ({"content": {}}, "Tool returned empty content"),
    ],
)
def test_a_tool_that_failed_is_a_tool_error_with_all_its_words(body, said):
    result = read_call_reply(body, http_status=200)
    assert result.status is ToolStatus.TOOL_ERROR
    assert said in result.content
    assert said in result.error


@pytest.mark.parametrize(
    ("detail", "status"),
    [
        ("'q' is a required property\n\nFailed validating 'required' in schema", ToolStatus.BAD_ARGUMENTS),
        ("Tool call timed out after 180 s", ToolStatus.TIMEOUT),
        ("404: Tool not found: web.nope", ToolStatus.TOOL_ERROR),
        ("boom", ToolStatus.TOOL_ERROR),
    ],
)
def test_an_exception_that_came_back_with_status_200_is_no_success(detail, status):
    with pytest.raises(CallFailedError) as caught:
        read_call_reply({"status_code": 500, "detail": detail}, http_status=200)
    assert caught.value.status is status
    assert detail in str(caught.value)


@pytest.mark.parametrize(
    ("http_status", "status"),
    [
        (401, ToolStatus.AUTH),
        (403, ToolStatus.AUTH),
        (402, ToolStatus.QUOTA),
        (429, ToolStatus.RATE_LIMITED),
        (422, ToolStatus.BAD_ARGUMENTS),
        (404, ToolStatus.TOOL_ERROR),
        (504, ToolStatus.TIMEOUT),
        (503, ToolStatus.CRASHED),
        (500, ToolStatus.TOOL_ERROR),
    ],
)
def test_an_honest_http_status_is_read_too_and_its_detail_reaches_the_model(http_status, status):
    body = {
        "status": "error",
        "content": {"error": "refused", "detail": "because"},
        "status_code": http_status,
        "detail": "because",
    }
    with pytest.raises(CallFailedError, match="refused: because") as caught:
        read_call_reply(body, http_status=http_status, retry_after="2")
    assert caught.value.status is status
    assert caught.value.retry_after_s == (2.0 if http_status == 429 else None)


def test_a_reply_without_content_is_no_reply_of_a_gateway():
    with pytest.raises(CallFailedError) as caught:
        read_call_reply({"result": 1}, http_status=200)
    assert caught.value.status is ToolStatus.CRASHED


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["content", "status", "status_code", "detail", "error", "type"]), inner)
    ),
    max_leaves=8,
)


@given(body=json_values, http_status=st.sampled_from([200, 404, 500]))
def test_any_json_is_a_typed_result_or_a_typed_failure(body, http_status):
    try:
        status = read_call_reply(body, http_status=http_status).status
    except CallFailedError as error:
        status = error.status
    assert status in {ToolStatus.OK, ToolStatus.TOOL_ERROR, ToolStatus.BAD_ARGUMENTS} or status.is_infrastructure
