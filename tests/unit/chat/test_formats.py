# ruff: noqa: E501 - rows of examples read better on one line
"""Every tool-call format: what it renders it reads back, and no text makes it raise, hang or lose a call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agentrl.chat import parse_completion
from agentrl.chat.formats import CALL_FORMATS, get_call_format
from agentrl.config.settings import settings_index
from agentrl.errors import ConfigError
from agentrl.types import ToolRequest, ToolSpec

FORMATS = sorted(CALL_FORMATS)
MARKERS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=a>", "</parameter>",
    "<|python_tag|>", '{"name": "f"', '"parameters": {', "[f(", "a=", "<|python_start|>", "<|python_end|>", "[TOOL_CALLS]",
    "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<|tool_call_start|>", "<|tool_call_end|>", "```python\n", "```",
    "<use_mcp_tool>", "</use_mcp_tool>", "<server_name>s</server_name>", "<tool_name>t</tool_name>", "<arguments>",
    "</arguments>", "{", "}", "[", "]", "(", ")", '"', "'", "'''", "\\", "\\ud800", "\\N{", ",", ";", "**", "\n", " ", "é🙂",
    "-1e999", "9" * 5000, "\ud800", "\x00",
]  # fmt: skip
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
TAGGED = st.lists(st.sampled_from([marker for marker in MARKERS if marker != "\ud800"]), max_size=6).map("".join)
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.\-]{0,10}", fullmatch=True)
CALLS = st.lists(
    st.builds(
        lambda name, arguments: ToolRequest(call_id="", name=name, arguments=arguments),
        NAMES,
        st.dictionaries(NAMES | st.text(max_size=6), JSON_VALUES | TAGGED, max_size=4),
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda call: call.name,
)


def spec_for(call: ToolRequest, *, server: str = "") -> ToolSpec:
    """A tool whose schema allows exactly these argument types."""
    properties = {name: {"type": json_type(value)} for name, value in call.arguments.items()}
    return ToolSpec(
        name=call.name, description="", parameters={"type": "object", "properties": properties}, server=server
    )


def json_type(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    names: Mapping[type, str] = {str: "string", int: "integer", float: "number", list: "array"}
    return names.get(type(value), "object")


def read_back(
    name: str, calls: Sequence[ToolRequest], *, before: str = "", after: str = ""
) -> list[tuple[str, Any, str | None]]:
    tools = [spec_for(call) for call in calls]
    call_format = get_call_format(name)
    try:
        text = call_format.render(calls, tools=tools)
    except ValueError:
        assume(False)  # the format has no way to write this argument, and says so
    parsed = parse_completion(before + text + after, call_format=call_format, tools=tools)
    return [(call.name, call.arguments, call.error) for call in parsed.tool_calls]


@pytest.mark.parametrize("name", FORMATS)
@given(CALLS)
@settings(deadline=None, max_examples=60)
def test_rendered_calls_read_back(name: str, calls: list[ToolRequest]) -> None:
    expected = [(call.name, call.arguments, None) for call in calls]
    assert read_back(name, calls) == expected
    assert read_back(name, calls, before="<think>x</think>before\n", after="\n\nafter") == expected


@pytest.mark.parametrize("name", FORMATS)
@given(st.text() | st.lists(st.sampled_from(MARKERS), max_size=30).map("".join))
@settings(deadline=None, max_examples=150)
def test_no_text_makes_a_format_raise(name: str, text: str) -> None:
    parsed = parse_completion(text, call_format=get_call_format(name))
    for index, call in enumerate(parsed.tool_calls):
        assert call.call_id == f"call_{index}"
        assert call.name or call.error
        json.dumps({"name": call.name, "arguments": call.arguments, "error": call.error}, ensure_ascii=False).encode()


def call(name: str, **arguments: Any) -> ToolRequest:
    return ToolRequest(call_id="", name=name, arguments=arguments)


TOOLS = (
    ToolSpec(
        name="search",
        description="Finds pages.",
        parameters={
            "type": "object",
            "properties": {
                "query": {"type": "string"},
                "limit": {"$ref": "#/$defs/Limit"},
                "exact": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            },
            "required": ["query"],
            "$defs": {"Limit": {"type": "integer"}},
        },
        server="web",
    ),
    ToolSpec(name="files.search", description="Finds files.", parameters={"type": "object"}, server="files"),
)
PARIS = ("search", {"query": "Paris", "limit": 3})
ROME = ("search", {"query": "Rome", "limit": 3})

# Written the way the models' own chat templates and model cards show it, not by our renderer.
GOOD: list[tuple[str, str, list[tuple[str, dict[str, Any]]], str]] = [
    (
        "hermes",
        'Look. <tool_call>\n{"name": "search", "arguments": {"query": "Paris", "limit": 3}}\n</tool_call>\n'
        '<tool_call>\n{"name": "search", "arguments": {"query": "Rome", "limit": 3}}\n</tool_call>',
        [PARIS, ROME],
        "Look.",
    ),
    (
        "qwen3_coder",
        "Look.\n<tool_call>\n<function=search>\n<parameter=query>\nParis\n</parameter>\n<parameter=limit>\n3\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=search>\n<parameter=query>\nRome\n</parameter>\n"
        "<parameter=limit>\n3\n</parameter>\n</function>\n</tool_call>",
        [PARIS, ROME],
        "Look.",
    ),
    (
        "qwen3_coder",  # without the outer tags, on one line, with Python's words, and with tags in the text
        "<function=search><parameter=query><b>a</b> </parameter> {\n\n<think></parameter><parameter=exact>True</parameter>"
        "</function> done",
        [("search", {"query": "<b>a</b> </parameter> {\n\n<think>", "exact": True})],
        "done",
    ),
    ("llama3", '{"name": "search", "parameters": {"query": "Paris", "limit": 3}}', [PARIS], ""),
    (
        "llama3",
        'Look.<|python_tag|>{"type": "function", "name": "search", "parameters": {"query": "Paris", "limit": 3}}; '
        '{"name": "search", "parameters": {"query": "Rome", "limit": 3}} ok',
        [PARIS, ROME],
        "Look. ok",
    ),
    ("llama3", '<|python_tag|>[search(query="Paris", limit=3), search(query="Rome", limit=3)]', [PARIS, ROME], ""),
    ("llama3", '<think>x</think>[{"name": "search", "parameters": {"query": "Paris", "limit": 3}}]', [PARIS], ""),
    ("pythonic", "[search(query='Paris', limit=3), search(query=\"Rome\", limit=3)]", [PARIS, ROME], ""),
    ("pythonic", "Look.<|python_start|>[search(query='Paris', limit=3)]<|python_end|> ok", [PARIS], "Look. ok"),
    (
        "pythonic",  # keywords and dashes as names, dots in the tool, constants of both languages, nested literals
        """[web.find-it(from='a)]\\n"', max-size=-1.5e1, ok=true, no=None, x={'k': [1, (2, 3)]}, s="a" 'b')]""",
        [("web.find-it", {"from": 'a)]\n"', "max-size": -15.0, "ok": True, "no": None, "x": {"k": [1, [2, 3]]}, "s": "ab"})],
        "",
    ),
    (
        "deepseekv3",
        "Look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n"
        '{"query": "Paris", "limit": 3}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n'
        '{"query": "Rome", "limit": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        [PARIS, ROME],
        "Look.",
    ),
    (
        "deepseekv31",
        "Look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>"
        '{"query": "Paris", "limit": 3}<｜tool▁call▁end｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>'
        '{"query": "Rome", "limit": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        [PARIS, ROME],
        "Look.",
    ),
    (
        "mistral",
        'Look.[TOOL_CALLS] [{"name": "search", "arguments": {"query": "Paris", "limit": 3}, "id": "aaaaaaaaa"}, '
        '{"name": "search", "arguments": {"query": "Rome", "limit": 3}, "id": "bbbbbbbbb"}]',
        [PARIS, ROME],
        "Look.",
    ),
    (
        "mistral",
        '[THINK]x[/THINK][TOOL_CALLS]search[CALL_ID]aaaaaaaaa[ARGS]{"query": "Paris", "limit": 3}'
        '[TOOL_CALLS]search[ARGS]{"query": "Rome", "limit": 3}',
        [PARIS, ROME],
        "",
    ),
    (
        "minicpm",
        "<|thought_start|>\nsearch\n<|thought_end|>\n<|tool_call_start|>\n```python\nsearch(query='Paris', limit=3)\n"
        "search(query='Rome', limit=3)\n```\n<|tool_call_end|>\nok",
        [PARIS, ROME],
        "ok",
    ),
    ("minicpm", "<|tool_call_start|>[search(query='Paris',limit=3)]<|tool_call_end|>", [PARIS], ""),
    (
        "mirorl",
        "Look.\n<use_mcp_tool>\n<server_name>web</server_name>\n<tool_name>search</tool_name>\n<arguments>\n"
        '{"query": "Paris", "limit": 3}\n</arguments>\n</use_mcp_tool>\n<use_mcp_tool><server_name>files</server_name>'
        '<tool_name>search</tool_name><arguments>{"glob": "</arguments></use_mcp_tool>"}</arguments></use_mcp_tool>',
        [PARIS, ("files.search", {"glob": "</arguments></use_mcp_tool>"})],
        "Look.",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "calls", "content"), GOOD)
def test_reads_what_the_models_write(name: str, text: str, calls: list[Any], content: str) -> None:
    parsed = parse_completion(text, call_format=get_call_format(name), tools=TOOLS)
    assert [(call.name, call.arguments, call.error) for call in parsed.tool_calls] == [(*call, None) for call in calls]
    assert parsed.content == content


@pytest.mark.parametrize(
    ("name", "text", "called", "reason"),
    [
        ("qwen3_coder", "<tool_call>search</tool_call>", "", "<function=NAME> is missing"),
        ("qwen3_coder", "<tool_call><function=search><parameter=query>Par", "search", "query is not closed"),
        ("qwen3_coder", "<tool_call><function=search>Paris</function></tool_call>", "search", "</function> is missing before"),
        ("llama3", '{"name": "search", "parameters": {"query": "Par', "search", "cut off"),
        ("llama3", '<|python_tag|>{"parameters": {}}', "", 'no "name"'),
        ("llama3", "<|python_tag|>import os", "", "not valid JSON"),
        ("llama3", "<|python_tag|>[search('Paris')]", "search", "an argument of the form name=value"),
        ("pythonic", "[search('Paris')]", "search", "an argument of the form name=value"),
        ("pythonic", "[search(query=Paris)]", "search", "a literal value before 'Paris)]'"),
        ("pythonic", "[search(query='Par", "search", "a literal value before"),
        ("pythonic", "[search(query='a', query='b')]", "search", "query is given twice"),
        ("pythonic", "[search(query='a'", "search", "cut off"),
        ("pythonic", "[search(x={1: 2})]", "search", "keys of a dictionary must be strings"),
        ("pythonic", "[search(x=" + "[" * 5000, "search", "more than 64 brackets"),
        ("pythonic", "[search(x='\\N{NO SUCH}')]", "search", "no character named"),
        ("pythonic", "[search(x=1e999)]", "search", "out of range"),
        ("pythonic", "<|python_start|>search<|python_end|>", "", "expected a call"),
        ("deepseekv3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n{oops}\n```<｜tool▁call▁end｜>", "search", "not valid JSON"),
        ("deepseekv3", "<｜tool▁call▁begin｜>search<｜tool▁call▁end｜>", "", "no name before its arguments"),
        ("deepseekv31", '<｜tool▁call▁begin｜>search<｜tool▁sep｜>{"query": "Par', "search", "cut off"),
        ("deepseekv31", "<｜tool▁call▁begin｜>search<｜tool▁sep｜>{} x<｜tool▁call▁end｜>", "search", "unexpected text"),
        ("mistral", '[TOOL_CALLS] [{"name": "search", "arguments": {"query": "Par', "search", "cut off"),
        ("mistral", "[TOOL_CALLS] []", "", "not valid JSON"),
        ("mistral", "[TOOL_CALLS]search[ARGS]{oops}", "search", "not valid JSON"),
        ("mistral", "[TOOL_CALLS]search[ARGS]3", "search", "must be a JSON object, not a number"),
        ("minicpm", "<|tool_call_start|>\n```python\nsearch(\n```\n<|tool_call_end|>", "search", "name=value before '```"),
        ("minicpm", "<|tool_call_start|><|tool_call_end|>", "", "expected a call"),
        ("mirorl", "<use_mcp_tool><tool_name>search</tool_name></use_mcp_tool>", "", "must name <server_name> and <tool_name>"),
        ("mirorl", "<use_mcp_tool><server_name>web</server_name><tool_name>search</tool_name><arguments>{oops}</arguments>"
         "</use_mcp_tool>", "search", "not valid JSON"),
        ("mirorl", "<use_mcp_tool><server_name>web</server_name><tool_name>search</tool_name>{}</use_mcp_tool>", "search",
         "<arguments> is missing"),
        ("mirorl", "<use_mcp_tool><server_name>web</server_name><tool_name>search</tool_name><arguments>{} x</arguments>"
         "</use_mcp_tool>", "search", "unexpected text after the arguments"),
    ],
)  # fmt: skip
def test_tells_the_model_what_is_wrong_with_a_call(name: str, text: str, called: str, reason: str) -> None:
    (request,) = parse_completion(f"before\n{text}", call_format=get_call_format(name), tools=TOOLS).tool_calls
    assert request.error is not None
    assert reason in request.error
    assert (request.name, request.arguments) == (called, {})
    if not name.startswith("mirorl"):
        assert get_call_format(name).how in request.error or "must be a JSON object" in request.error


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_inside_the_thinking_does_not_count_and_tags_inside_a_call_are_text(name: str) -> None:
    call_format = get_call_format(name)
    first, second = (call_format.render([call("search", query=query)], tools=TOOLS) for query in ("a", "</think> b"))
    parsed = parse_completion(f"<think>\n{first}\n</think>\n{second}", call_format=call_format, tools=TOOLS)
    assert [request.arguments for request in parsed.tool_calls] == [{"query": "</think> b"}]
    assert first in parsed.reasoning


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_behind_a_call_stays_visible(name: str) -> None:
    text = get_call_format(name).render([call("search", query="a")], tools=TOOLS)
    parsed = parse_completion(f"{text}\n<answer>5</answer>", call_format=get_call_format(name), tools=TOOLS)
    assert parsed.content == "<answer>5</answer>"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "text", ["plain text", "<answer>5</answer>", '{"answer": 5}', "[1, 2, 3]", "a[0](b)", "x = {'a': 1}", ""]
)
def test_text_without_a_call_is_content(name: str, text: str) -> None:
    parsed = parse_completion(text, call_format=get_call_format(name))
    assert (parsed.content, parsed.tool_calls) == (text, ())


OPENINGS = [
    "<tool_call><function=f><parameter=a>", "<function=f>", "<tool_call>", '\n{"name": "f", ', '\n{"name": "', "\n[f(", "\n[f(a='",
    "\n[f(a=[", "\n[f(a='''", "\n[f(), ", '<|python_tag|>{"a": ', "<|python_tag|>", "<|python_start|>", "<|python_start|>[f(a=1), ",
    '[TOOL_CALLS] [{"name": "f"}, ', "[TOOL_CALLS]f", "[TOOL_CALLS]f[ARGS]{", "<｜tool▁call▁begin｜>", "<｜tool▁call▁begin｜>function",
    "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{", "<|tool_call_start|>", "<|tool_call_start|>f(a=[", "<|tool_call_start|>f(a='",
    "<use_mcp_tool>", "<use_mcp_tool><server_name>s</server_name><tool_name>t</tool_name><arguments>{", "</think><think>",
]  # fmt: skip


@pytest.mark.timeout(60)  # linear: about a second each; quadratic: hours
@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"qwen", "qwen25"}))
def test_reads_endless_repetition_in_linear_time(name: str) -> None:
    for opening in OPENINGS:
        parse_completion(opening * 10_000, call_format=get_call_format(name))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", ["[" * 500 + "1" + "]" * 500, '{"a": ' * 990 + "1" + "}" * 990, "0x" + "F" * 5000])
def test_a_value_that_nothing_could_write_again_makes_the_call_malformed_and_never_raises(
    name: str, value: str
) -> None:
    call_format = get_call_format(name)
    spec = ToolSpec(name="search", description="", parameters={"properties": {"q": {}}}, server="web")
    text = call_format.render([ToolRequest(call_id="", name="search", arguments={"q": "Rome"})], tools=[spec])
    (call,) = parse_completion(
        text.replace('"Rome"', value).replace("Rome", value), call_format=call_format, tools=[spec]
    ).tool_calls
    if call.error is None:
        assert isinstance(call.arguments["q"], str)  # the format has bare text
        return
    assert call.arguments == {}


def test_the_setting_offers_exactly_the_formats_there_are() -> None:
    assert set(settings_index()["tool_call_parser"].choices) == set(CALL_FORMATS)


def test_an_unknown_format_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'llama3'"):
        get_call_format("lama3")
    with pytest.raises(ConfigError, match="did you mean qwen3_coder"):
        settings_index()["tool_call_parser"].parse("qwen3-coder", origin="--tool_call_parser")
