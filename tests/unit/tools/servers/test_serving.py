import socket

import pytest

from agentrl.tools.servers.serving import OperationError, ServedTool, _failed, listen, make_server


def test_connections_do_not_wait_for_delayed_acknowledgements():
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def _nothing(_arguments):
    return ""


def test_the_schema_of_a_tool_allows_nothing_else():
    tool = ServedTool(
        name="t", description="d", properties={"a": {"type": "string"}, "b": {"type": "integer"}}, required=("a",),
        run=_nothing,
    )  # fmt: skip
    assert tool.input_schema["required"] == ["a"]
    assert tool.input_schema["additionalProperties"] is False
    assert make_server("s", tool).name == "s"


@pytest.mark.parametrize(
    ("error", "meta"),
    [
        (OperationError("no"), None),
        (OperationError("no", status="quota"), {"agentrl/status": "quota"}),
        (
            OperationError("no", status="rate_limited", retry_after_s=2.0),
            {"agentrl/status": "rate_limited", "agentrl/retry_after_s": 2.0},
        ),
    ],
)
def test_a_failure_says_in_its_meta_who_is_to_blame(error, meta):
    result = _failed(error)
    assert (result.is_error, result.content[0].text, result.meta) == (True, "error: no", meta)
