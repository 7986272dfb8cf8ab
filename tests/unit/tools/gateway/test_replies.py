import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.tools.gateway.replies import call_body, http_status, mcp_result
from agentrl.tools.gateway_replies import read_call_reply
from agentrl.types import Recovery, ToolResult, ToolSpec, ToolStatus

SPECS = {
    recovery: ToolSpec(name="t", description="", parameters={}, server="s", recovery=recovery) for recovery in Recovery
}
FAILURES = [status for status in ToolStatus if status is not ToolStatus.OK]


def is_error_to_agentdocks_clients(body):
    """What the two known clients look at."""
    content = body.get("content")
    first = body.get("status_code", 0) >= 400 and "detail" in body
    second = body.get("status") == "error" or (isinstance(content, dict) and ("error" in content or not content))
    return first, second


def test_a_failure_may_quote_half_a_character_of_the_request():
    result = ToolResult(status=ToolStatus.BAD_ARGUMENTS, content="error: '\ud800'", error="'\ud800'")
    assert call_body(result, spec=None)["detail"] == "'?'"
    assert mcp_result(result).content[0].text == "error: '?'"


@pytest.mark.parametrize("status", FAILURES)
@pytest.mark.parametrize("recovery", list(Recovery))
def test_every_failure_is_one_to_every_client_and_only_repeatable_calls_are_repeated(status, recovery):
    result = ToolResult(status=status, content="error: why", error="why")
    spec = SPECS[recovery]
    body = call_body(result, spec=spec)
    assert is_error_to_agentdocks_clients(body) == (True, True)
    assert body["detail"] == body["content"]["error"] == "why"
    assert body["status_code"] == http_status(result, spec=spec) >= 400
    assert http_status(result, spec=spec) < 500 or recovery is Recovery.STATELESS
    shown = mcp_result(result)
    assert (shown.is_error, shown.meta) == (True, {"agentrl/status": str(status)})


def test_several_items_are_a_list_of_typed_items_that_no_client_takes_for_an_error():
    items = ({"type": "text", "text": "a"}, {"type": "image", "data": "aGk=", "mimeType": "image/png"})
    result = ToolResult(status=ToolStatus.OK, content="a\n[Image: image/png]", items=items, structured={"n": 1})
    body = call_body(result, spec=None)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    assert body == {"content": [items[0], image]}
    assert is_error_to_agentdocks_clients(body) == (False, False)
    assert read_call_reply(body, http_status=200).content == result.content
    shown = mcp_result(result)
    assert [item.type for item in shown.content] == ["text", "image"]
    assert shown.structured_content == {"n": 1}


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text() | st.integers(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(["error", "status"]), inner),
)


@given(st.text() | JSON_VALUES.map(json.dumps))
def test_no_success_reads_as_an_error_and_none_is_lost(text):
    body = call_body(ToolResult(status=ToolStatus.OK, content=text), spec=SPECS[Recovery.STATEFUL])
    assert is_error_to_agentdocks_clients(body) == (False, False)
    content = body["content"]
    assert content == text or content == json.loads(text)
    json.dumps(body, ensure_ascii=False, allow_nan=False).encode("utf-8")


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000, '{"a": Infinity}', "1e999", '"\\ud800"', "[-1e999]"])
def test_json_that_cannot_be_passed_on_stays_text(text):
    assert call_body(ToolResult(status=ToolStatus.OK, content=text), spec=None) == {"content": text}
