"""Tool-format validity of a Record's calls."""

import pytest

from agentrl.scoring.tool_format import tool_format
from agentrl.types import DispatchedSamplingTask, DispatchKind, ToolSpec
from factories import EPOCH_START

SCHEMA = {
    "type": "object",
    "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}},
    "required": ["query"],
}
TOOLS = [ToolSpec(name="search", description="", parameters=SCHEMA)]


def call(arguments: object, *, name: str = "search", status: str = "ok") -> DispatchedSamplingTask:
    return DispatchedSamplingTask(
        id="c", record_id="r", task_id="t", turn=0, index=1, kind=DispatchKind.TOOL, target=name, status=status,
        request={"name": name, "arguments": arguments, "call_id": "1"}, response={"content": ""},
        started_at=EPOCH_START, finished_at=EPOCH_START,
    )  # fmt: skip


GOOD = call({"query": "x", "limit": 3})


@pytest.mark.parametrize(
    ("calls", "score"),
    [
        ([], 0), ([GOOD], 1), ([GOOD, GOOD], 1), ([call({"query": "x"}, status="tool_error")], 1),
        ([call({"query": "x"}, status="timeout")], 1), ([call({"query": "x"}, name="fetch")], 0),
        ([call({"limit": 3})], 0),
        ([call({"query": "x", "page": 2})], 0), ([call({"query": 3})], 0), ([call({}, status="malformed")], 0),
        ([GOOD, call({"query": "x"}, status="unknown_tool")], 0), ([call({"query": "x"}, status="bad_arguments")], 0),
        ([call("query")], 0),
    ],
)  # fmt: skip
def test_all_calls_must_be_well_formed_and_there_must_be_one(calls, score):
    assert tool_format(calls, TOOLS) == score


def test_a_schema_that_allows_further_arguments_is_taken_at_its_word():
    tools = [ToolSpec(name="search", description="", parameters={**SCHEMA, "additionalProperties": True})]
    assert tool_format([call({"query": "x", "page": 2})], tools) == 1


def test_arguments_may_be_named_by_what_a_schema_refers_to():
    schema = {"$ref": "#/$defs/query", "$defs": {"query": SCHEMA}}
    assert tool_format([GOOD], [ToolSpec(name="search", description="", parameters=schema)]) == 1


def test_a_number_beyond_comparison_is_a_bad_argument():
    tools = [ToolSpec(name="search", description="", parameters={"properties": {"n": {"multipleOf": 0.5}}})]
    assert tool_format([call({"n": 10**400})], tools) == 0


@pytest.mark.parametrize(
    "schema",
    [{"type": "nonsense"}, {"$ref": "http://example.invalid/schema"}, {"properties": None}, {"properties": []}],
)
def test_a_broken_schema_is_not_the_policys_fault(schema):
    assert tool_format([call({})], [ToolSpec(name="search", description="", parameters=schema)]) == 1
