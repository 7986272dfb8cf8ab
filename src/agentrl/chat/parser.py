"""What a completion says: reasoning, visible text, tool calls. Pure; never raises, whatever the text.

    <think> plan </think> Let me look. <tool_call> {"name": "search", "arguments": {"q": "x"}} </tool_call>
            ^reasoning    ^content                 ^one ToolRequest

A call that cannot be read becomes a ToolRequest with `error`, a sentence the model can act on, so that the loop can
answer it instead of dropping it. Tags inside the JSON of a call are text, not tags.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from agentrl.types import ToolRequest

_THINK_OPEN = "<think>"
_THINK_CLOSE = "</think>"
_CALL_OPEN = "<tool_call>"
_CALL_CLOSE = "</tool_call>"
_TAG = re.compile(r"</?think>|<tool_call>")
_CALL_BORDER = re.compile(r"</?tool_call>")
_SPACE = re.compile(r"\s*")
_NAME = re.compile(r'"name"\s*:\s*"([^"\\\s]{1,200})"')
_HOW = 'write one JSON object {"name": ..., "arguments": {...}} between <tool_call> and </tool_call>'


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCompletion:
    """A completion taken apart. `tool_calls` keeps the model's order, unreadable calls included."""

    reasoning: str
    content: str
    tool_calls: tuple[ToolRequest, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """One tool call in the text: [start, end) is removed from the content."""

    start: int
    end: int
    request: ToolRequest


def parse_completion(text: str) -> ParsedCompletion:
    """Take a completion apart.

    Reasoning is everything before the last `</think>`, with or without an opening tag; after it, an unclosed `<think>`
    hides the rest. Only the visible part is searched for tool calls. Both texts are stripped of surrounding space.
    """
    reasoning, visible = _split_reasoning(text)
    blocks = list(_call_blocks(visible))
    kept: list[str] = []
    position = 0
    for block in blocks:
        kept.append(visible[position : block.start])
        position = block.end
    kept.append(visible[position:])
    return ParsedCompletion(
        reasoning=reasoning, content="".join(kept).strip(), tool_calls=tuple(block.request for block in blocks)
    )


def _split_reasoning(text: str) -> tuple[str, str]:
    close = -1
    unclosed = -1  # position of the first <think> after the last </think>
    for position, tag in _think_tags(text):
        if tag == _THINK_CLOSE:
            close, unclosed = position, -1
        elif unclosed < 0:
            unclosed = position
    before = text[:close] if close >= 0 else ""
    start = close + len(_THINK_CLOSE) if close >= 0 else 0
    hidden = text[unclosed:] if unclosed >= 0 else ""
    visible = text[start:unclosed] if unclosed >= 0 else text[start:]
    thoughts = (part.strip().removeprefix(_THINK_OPEN).strip() for part in (before, hidden))
    return "\n".join(filter(None, thoughts)), visible


def _think_tags(text: str) -> Iterator[tuple[int, str]]:
    """Thinking tags in order, without those that are text inside the JSON of a complete call."""
    position = 0
    while (match := _TAG.search(text, position)) is not None:
        position = match.end()
        if match[0] == _CALL_OPEN:
            position = _json_end(text, position)
        else:
            yield match.start(), match[0]


def _json_end(text: str, start: int) -> int:
    """Where the JSON value after `start` ends; `start` itself where there is none."""
    try:
        _, end = _decode(text, start)
    except (ValueError, RecursionError):
        return start
    return end


def _call_blocks(text: str) -> Iterator[_Block]:
    position = 0
    index = 0
    while (start := text.find(_CALL_OPEN, position)) >= 0:
        block = _read_block(text, start, call_id=f"call_{index}")
        yield block
        position = block.end
        index += 1


def _read_block(text: str, start: int, *, call_id: str) -> _Block:
    body = start + len(_CALL_OPEN)
    try:
        call, json_end = _decode(text, body)
    except (ValueError, RecursionError) as error:
        end, is_closed = _border(text, body)
        inner = text[body : end - len(_CALL_CLOSE) if is_closed else end]
        request = _failed(call_id, name=_guess_name(inner), error=_why_unreadable(error, inner, is_closed=is_closed))
        return _Block(start=start, end=end, request=request)
    end, is_closed = _border(text, json_end)
    if not is_closed:
        return _Block(start=start, end=json_end, request=_to_request(call, call_id=call_id))
    rest = text[json_end : end - len(_CALL_CLOSE)].strip()
    if rest:
        error_text = f"unexpected text after the JSON object of the tool call: {rest[:80]!r}; {_HOW}"
        return _Block(start=start, end=end, request=_failed(call_id, name=_known_name(call), error=error_text))
    return _Block(start=start, end=end, request=_to_request(call, call_id=call_id))


def _border(text: str, start: int) -> tuple[int, bool]:
    """Where a block whose JSON does not reach beyond `start` ends, and whether a closing tag ends it."""
    match = _CALL_BORDER.search(text, start)
    if match is None:
        return len(text), False
    is_closed = match[0] == _CALL_CLOSE
    return (match.end() if is_closed else match.start()), is_closed


def _to_request(call: Any, *, call_id: str) -> ToolRequest:
    if not isinstance(call, dict):
        return _failed(call_id, error=f"a tool call must be one JSON object, not {_kind(call)}; {_HOW}")
    name = _known_name(call)
    if not name:
        return _failed(call_id, error=f'the tool call has no "name" that is a non-empty string; {_HOW}')
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = _decode_all(arguments)
        except (ValueError, RecursionError) as error:
            return _failed(call_id, name=name, error=f'"arguments" of {name} is a string without valid JSON: {error}')
    elif arguments is None or isinstance(arguments, str):
        arguments = {}
    if not isinstance(arguments, dict):
        return _failed(call_id, name=name, error=f'"arguments" of {name} must be a JSON object, not {_kind(arguments)}')
    if not _is_text(call):
        return _failed(call_id, name="", error="the tool call contains half of a surrogate pair (\\ud800-\\udfff)")
    return ToolRequest(call_id=call_id, name=name, arguments=arguments)


def _failed(call_id: str, *, error: str, name: str = "") -> ToolRequest:
    return ToolRequest(call_id=call_id, name=name, arguments={}, error=error)


def _why_unreadable(error: ValueError | RecursionError, inner: str, *, is_closed: bool) -> str:
    if isinstance(error, RecursionError):
        return f"the JSON of the tool call is nested too deeply; {_HOW}"
    if not inner.strip():
        return f"the tool call is empty; {_HOW}"
    if not is_closed:
        return f"the tool call is cut off: its JSON is incomplete and {_CALL_CLOSE} is missing; {_HOW}"
    return f"the tool call is not valid JSON: {error}; {_HOW}"


def _known_name(call: Any) -> str:
    name = call.get("name") if isinstance(call, dict) else None
    return name.strip() if isinstance(name, str) and _is_text(name) else ""


def _guess_name(inner: str) -> str:
    match = _NAME.search(inner)
    return match[1] if match else ""


def _kind(value: Any) -> str:
    names: Mapping[type, str] = {list: "a list", dict: "an object", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


def _is_text(value: Any) -> bool:
    """Whether every string in the value can be written as UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _decode(text: str, start: int) -> tuple[Any, int]:
    """The JSON value at `start` and where it ends. Raw line breaks in strings are accepted: models write them.

    Looks beyond the next opening tag only from within a string, so that a model stuck repeating the tag costs linear
    time.
    """
    space = _SPACE.match(text, start)
    begin = space.end() if space else start
    end = text.find(_CALL_OPEN, begin)
    while True:
        piece = text[begin:] if end < 0 else text[begin:end]
        try:
            value, length = _DECODER.raw_decode(piece)
        except json.JSONDecodeError as error:
            if end < 0 or not error.msg.startswith("Unterminated string"):
                raise ValueError(f"{error.msg} at character {error.pos}") from error
            end = text.find(_CALL_OPEN, begin + 2 * len(piece))
        else:
            return value, begin + length


def _decode_all(text: str) -> Any:
    value, end = _decode(text, 0)
    if text[end:].strip():
        raise ValueError(f"extra text at character {end}")
    return value


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is out of range")
    return value


_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse_constant, parse_float=_finite)
