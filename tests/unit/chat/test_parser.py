"""parse_completion: reasoning, visible text and tool calls, from any text a model can write."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentrl.chat import parse_completion

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
TAGGED_STRINGS = st.lists(
    st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", '"', "\\", "{", "}", "a", "\n"]), max_size=8
).map("".join)
ARGUMENTS = st.dictionaries(st.text(max_size=8), JSON_VALUES | TAGGED_STRINGS, max_size=4)
NAMES = st.text(st.characters(categories=["L", "N"], include_characters="._-"), min_size=1, max_size=12)


def render_call(name: str, arguments: Any, *, ensure_ascii: bool = False) -> str:
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=ensure_ascii)
    return f"<tool_call>\n{call}\n</tool_call>"


def test_takes_reasoning_text_and_call_apart() -> None:
    parsed = parse_completion("<think>\nplan\n</think>\n\nLooking. " + render_call("search", {"q": "x"}))
    assert parsed.reasoning == "plan"
    assert parsed.content == "Looking."
    (call,) = parsed.tool_calls
    assert (call.call_id, call.name, call.arguments, call.error) == ("call_0", "search", {"q": "x"}, None)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("plain answer", "", "plain answer"),
        ("thought without opening</think>answer", "thought without opening", "answer"),
        ("<think>a</think>b</think>c", "a</think>b", "c"),
        ("<think>never closed <answer>5</answer>", "never closed <answer>5</answer>", ""),
        ("<think>a</think>\n<think>again <answer>5</answer>", "a\nagain <answer>5</answer>", ""),
        ("visible <think>hidden", "hidden", "visible"),
        ("<think></think>", "", ""),
        ("", "", ""),
    ],
)
def test_hides_reasoning_however_it_is_tagged(text: str, reasoning: str, content: str) -> None:
    parsed = parse_completion(text)
    assert (parsed.reasoning, parsed.content, parsed.tool_calls) == (reasoning, content, ())


def test_ignores_calls_inside_the_reasoning() -> None:
    parsed = parse_completion(f"<think>maybe {render_call('a', {})} or not</think>{render_call('b', {})}")
    assert [call.name for call in parsed.tool_calls] == ["b"]
    assert render_call("a", {}) in parsed.reasoning


@pytest.mark.parametrize("tag", ["</tool_call>", "<tool_call>", "</think>", "<think>"])
def test_tags_inside_a_string_argument_are_text(tag: str) -> None:
    text = f"<think>t</think>go {render_call('search', {'q': f'what is {tag}?'})} done"
    parsed = parse_completion(text)
    assert [call.arguments for call in parsed.tool_calls] == [{"q": f"what is {tag}?"}]
    assert (parsed.reasoning, parsed.content) == ("t", "go  done")


def test_numbers_parallel_calls_in_order_and_keeps_the_bad_ones() -> None:
    parsed = parse_completion(
        f"{render_call('a', {})}<tool_call>{{oops}}</tool_call>{render_call('c', {'x': [1]})} tail"
    )
    assert [call.call_id for call in parsed.tool_calls] == ["call_0", "call_1", "call_2"]
    assert [call.error is None for call in parsed.tool_calls] == [True, False, True]
    assert parsed.content == "tail"


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name": "f"}', {}),
        ('{"name": "f", "arguments": null}', {}),
        ('{"name": "f", "arguments": ""}', {}),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', {"a": 1}),
        ('{"name": "f", "parameters": {"a": 1}}', {"a": 1}),
        ('{"name": "f", "arguments": {"code": "line 1\nline 2"}}', {"code": "line 1\nline 2"}),
    ],
)
def test_accepts_clear_calls_in_unusual_forms(body: str, arguments: dict[str, Any]) -> None:
    (call,) = parse_completion(f"<tool_call>{body}</tool_call>").tool_calls
    assert (call.name, call.arguments, call.error) == ("f", arguments, None)


@pytest.mark.parametrize(
    ("body", "name", "reason"),
    [
        ('{"name": "f", "arguments": {"a": 1,}}', "f", "not valid JSON"),
        ("{'name': 'f'}", "", "not valid JSON"),
        ('[{"name": "f"}]', "", "one JSON object, not a list"),
        ('"f"', "", "one JSON object, not a string"),
        ("3", "", "one JSON object, not a number"),
        ("true", "", "one JSON object, not a boolean"),
        ("null", "", "one JSON object, not null"),
        ('{"arguments": {}}', "", 'no "name"'),
        ('{"name": 3, "arguments": {}}', "", 'no "name"'),
        ('{"name": " ", "arguments": {}}', "", 'no "name"'),
        ('{"name": "f", "arguments": [1]}', "f", "must be a JSON object, not a list"),
        ('{"name": "f", "arguments": 1}', "f", "must be a JSON object, not a number"),
        ('{"name": "f", "arguments": "{"}', "f", "a string without valid JSON"),
        ('{"name": "f", "arguments": "{} {}"}', "f", "extra text"),
        ('{"name": "f", "arguments": "[1]"}', "f", "must be a JSON object, not a list"),
        ('{"name": "f", "arguments": {"a": NaN}}', "f", "NaN is not JSON"),
        ('{"name": "f", "arguments": {"a": 1e999}}', "f", "out of range"),
        ('{"name": "f", "arguments": {"a": "\\ud800"}}', "", "surrogate"),
        ('{"name": "f"} {"name": "g"}', "f", "unexpected text after"),
        ("  ", "", "empty"),
        ('{"name": "f", "arguments": ' + '{"a":' * 100_000, "f", "nested too deeply"),
    ],
)
def test_explains_to_the_model_what_is_wrong_with_a_call(body: str, name: str, reason: str) -> None:
    parsed = parse_completion(f"before <tool_call>{body}</tool_call> after")
    (call,) = parsed.tool_calls
    assert call.error is not None
    assert reason in call.error
    assert (call.name, call.arguments) == (name, {})
    assert parsed.content == "before  after"


def test_accepts_an_unclosed_last_call_whose_json_is_complete() -> None:
    (call,) = parse_completion('ok <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n').tool_calls
    assert (call.name, call.arguments, call.error) == ("f", {"a": 1}, None)


def test_an_unclosed_call_ends_where_the_next_begins() -> None:
    parsed = parse_completion('<tool_call>{"name": "f"}\n<tool_call>{"name": "g"}</tool_call>')
    assert [(call.name, call.error) for call in parsed.tool_calls] == [("f", None), ("g", None)]
    assert parsed.content == ""


@pytest.mark.parametrize("body", ['{"name": "f", "arguments": {"a": "cut', '{"name": "f", "argum', '{"name": "f"'])
def test_reports_a_call_cut_off_by_the_length_limit(body: str) -> None:
    parsed = parse_completion(f"text <tool_call>{body}")
    (call,) = parsed.tool_calls
    assert call.error is not None
    assert "cut off" in call.error
    assert call.name == "f"
    assert parsed.content == "text"


@given(st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=4), st.booleans())
@example([("f", {"a": "</tool_call>"})], False)
@settings(deadline=None, max_examples=40)
def test_rendered_calls_parse_back(calls: list[tuple[str, dict[str, Any]]], ensure_ascii: bool) -> None:
    text = "\n".join(render_call(name, arguments, ensure_ascii=ensure_ascii) for name, arguments in calls)
    parsed = parse_completion(f"<think>x</think>before {text} after")
    assert [(call.name, call.arguments, call.error) for call in parsed.tool_calls] == [
        (name, arguments, None) for name, arguments in calls
    ]
    assert parsed.content.split() == ["before", "after"]
    assert parsed.reasoning == "x"


PIECES = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {', '{"name": "f"}', "}", "[",
    '"', "\\", "\\u", "d800", " ", "\n", "1e999", "NaN", "\ud800", "9" * 5000, "text",
]  # fmt: skip


@given(st.text() | st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
@settings(deadline=None, max_examples=300)
def test_never_raises_and_never_loses_a_visible_call(text: str) -> None:
    parsed = parse_completion(text)
    for index, call in enumerate(parsed.tool_calls):
        assert call.call_id == f"call_{index}"
        assert call.name or call.error
        json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False).encode()
    assert "<tool_call>" not in parsed.content
    if "<tool_call>" in text and "think>" not in text:
        assert parsed.tool_calls


@pytest.mark.timeout(20)  # linear: well under a second; quadratic: minutes
@pytest.mark.parametrize(
    "piece",
    [
        "<tool_call>",
        '<tool_call>{"a": ',
        '<tool_call>{"a": "',
        '<tool_call>{"name": "f"}',
        "</think><think>",
        "<tool_call>[[[",
    ],
)
def test_reads_endless_repetition_in_linear_time(piece: str) -> None:
    parse_completion(piece * 30_000)


def test_reads_an_argument_full_of_tags_in_linear_time() -> None:
    (call,) = parse_completion(render_call("f", {"a": "<tool_call></think>" * 50_000})).tool_calls
    assert call.error is None
