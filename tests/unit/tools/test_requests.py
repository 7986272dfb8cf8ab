import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.tools.requests import ArgumentCheck, cut
from agentrl.types import ToolSpec


def check_of(schema):
    return ArgumentCheck(ToolSpec(name="tool", description="", parameters=schema))


def test_allowed_arguments_have_no_problem():
    check = check_of({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
    assert check.problem({"n": 1}) is None
    assert check.problem({"n": 1, "more": 2}) is None


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "'n' is a required property"),
        ({"n": "x"}, "n: 'x' is not of type 'integer'"),
        ({"n": 1, "list": [1, "two"]}, "list.1: 'two' is not of type 'integer'"),
    ],
)
def test_a_problem_says_where_and_what(arguments, problem):
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "list": {"type": "array", "items": {"type": "integer"}}},
        "required": ["n"],
    }
    assert check_of(schema).problem(arguments) == problem


def test_a_problem_with_a_huge_value_stays_short():
    assert len(check_of({"properties": {"n": {"type": "integer"}}}).problem({"n": "x" * 10_000})) == 300


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "no-such-type"},
        {"$ref": "#/$defs/absent"},
        {"$ref": "https://example.org/schema.json"},
        {"$ref": "#"},
    ],
)
def test_a_broken_schema_leaves_the_check_to_the_server_and_is_logged(caplog, schema):
    with caplog.at_level(logging.WARNING):
        check = check_of(schema)
        assert check.problem({"n": 1}) is None
        assert check.problem({"n": 1}) is None
    assert "tool" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"n": 10**400}, "a number is out of range"),
        ({"s": "\ud800"}, "contains half of a surrogate pair"),
        ({"d": json.loads("[" * 200 + "]" * 200)}, "more than 64 brackets"),
        ({"n": 10**5000}, "thousands of digits"),
    ],
)
def test_arguments_that_cannot_be_checked_or_sent_are_a_problem_and_no_exception(arguments, problem):
    assert problem in check_of({"properties": {"n": {"multipleOf": 0.5}}}).problem(arguments)


@given(text=st.text(), max_chars=st.integers(100, 300))
def test_a_cut_text_is_within_the_limit_and_a_short_one_unchanged(text, max_chars):
    assert cut(text, max_chars=max_chars) == text if len(text) <= max_chars else True
    long = cut(text * 300, max_chars=max_chars)
    assert len(long) <= max_chars
    assert long == text * 300 or long.endswith(f"the limit is {max_chars}]")


def test_half_a_surrogate_pair_never_reaches_the_tokenizer():
    assert cut("a\ud83d", max_chars=100) == "a?"
