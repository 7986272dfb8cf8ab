"""JSON as models write it in tool calls: found in running text, with strict values and clear complaints. Pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from agentrl.chat.formats.interface import failed
from agentrl.types import ToolRequest, why_unusable

_SPACE = re.compile(r"\s*")
_NAME = re.compile(r'"name"\s*:\s*"([^"\\\s]{1,200})"')
_NEXT = re.compile(r"\s*[,;]?\s*(?=\{)")
_ESCAPE_LENGTH = 6  # \u0000
_LIST_END = re.compile(r"\s*\]")


class CutOffError(ValueError):
    """The text ends before the JSON value does."""


def decode(text: str, start: int, *, border: re.Pattern[str]) -> tuple[Any, int]:
    """The JSON value at `start` and where it ends. Raw line breaks in strings are accepted: models write them.

    Looks beyond the next `border` (where another call begins) only while the value is still open there, so that a
    model stuck repeating the opening costs linear time.

    Raises:
        ValueError: there is no JSON value; CutOffError: the text ends within it.
        RecursionError: it is nested too deeply.
    """
    begin = after_space(text, start)
    found = border.search(text, begin)
    while True:
        piece = text[begin:] if found is None else text[begin : found.start()]
        try:
            value, length = _DECODER.raw_decode(piece)
        except json.JSONDecodeError as error:
            if not _is_open(error, piece):
                raise ValueError(f"{error.msg} at character {error.pos}") from error
            if found is None:
                raise CutOffError(f"{error.msg} at character {error.pos}") from error
            found = border.search(text, max(begin + 2 * len(piece), found.end()))
        else:
            return value, begin + length


def _is_open(error: json.JSONDecodeError, piece: str) -> bool:
    """Whether the value may go on behind the piece: it ends within a string, an escape, or before what must follow."""
    if error.msg.startswith("Unterminated string"):
        return True
    return error.pos >= len(piece.rstrip()) - (_ESCAPE_LENGTH if error.msg.startswith("Invalid \\") else 0)


def decode_all(text: str) -> Any:
    """The JSON value that `text` is. Raises ValueError, RecursionError."""
    value, end = _DECODER.raw_decode(text, after_space(text, 0))
    if text[end:].strip():
        raise ValueError(f"extra text at character {end}")
    return value


def after_space(text: str, position: int) -> int:
    """The first position from `position` on that is no white space."""
    space = _SPACE.match(text, position)
    return space.end() if space else position


def request_of(call: Any, *, how: str) -> ToolRequest:
    """The call that a decoded `{"name": ..., "arguments": {...}}` asks for."""
    if not isinstance(call, dict):
        return failed(error=f"a tool call must be one JSON object, not {_kind(call)}; {how}")
    name = name_in(call)
    if not name:
        return failed(error=f'the tool call has no "name" that is a non-empty string; {how}')
    return request_with(name, call.get("arguments", call.get("parameters")))


def request_with(name: str, arguments: Any) -> ToolRequest:
    """The call of `name` with decoded arguments: an object, JSON of one in a string, or nothing."""
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = decode_all(arguments)
        except (ValueError, RecursionError) as error:
            return failed(name=name, error=f'"arguments" of {name} is a string without valid JSON: {error}')
    elif arguments is None or isinstance(arguments, str):
        arguments = {}
    if not isinstance(arguments, dict):
        return failed(name=name, error=f'"arguments" of {name} must be a JSON object, not {_kind(arguments)}')
    return ToolRequest(call_id="", name=name, arguments=arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSequence:
    """Calls one after the other. `failure` is where the first unreadable one begins, if one does."""

    requests: tuple[ToolRequest, ...]
    end: int
    failure: int | None


def read_sequence(text: str, start: int, *, border: re.Pattern[str], how: str) -> CallSequence:
    """Calls as JSON objects, separated by `,`, `;` or space, in a JSON list or not. What cannot be read is one call."""
    position = after_space(text, start)
    is_list = text.startswith("[", position)
    position += is_list
    requests: list[ToolRequest] = []
    while True:
        try:
            value, end = decode(text, position, border=border)
        except (ValueError, RecursionError) as error:
            found = border.search(text, position + 1)
            inner = text[position : found.start() if found else len(text)]
            requests.append(failed(name=guess_name(inner), error=why_unreadable(error, inner, how=how)))
            return CallSequence(requests=tuple(requests), end=position, failure=position)
        requests.append(request_of(value, how=how))
        position = end
        following = _NEXT.match(text, position)
        if following is None:
            break
        position = following.end()
    closing = _LIST_END.match(text, position) if is_list else None
    return CallSequence(requests=tuple(requests), end=closing.end() if closing else position, failure=None)


def decode_call(
    text: str, start: int, *, opens: re.Pattern[str], border: re.Pattern[str], how: str
) -> tuple[Any, int] | str:
    """The JSON value at `start` and where it ends; a str says to the model why there is none.

    `opens` is where another call begins, `border` also where this one may end.
    """
    try:
        return decode(text, start, border=opens)
    except (ValueError, RecursionError) as error:
        found = border.search(text, start)
        return why_unreadable(error, text[start : found.start() if found else len(text)], how=how)


def why_unreadable(error: ValueError | RecursionError, inner: str, *, how: str) -> str:
    """What to tell the model about a call whose JSON is `inner`."""
    if isinstance(error, RecursionError):
        return f"the JSON of the tool call is nested too deeply; {how}"
    if not inner.strip():
        return f"the tool call is empty; {how}"
    if isinstance(error, CutOffError):
        return f"the tool call is cut off: its JSON is incomplete; {how}"
    return f"the tool call is not valid JSON: {error}; {how}"


def name_in(call: Any) -> str:
    """The `name` of a decoded call; empty where it has none."""
    name = call.get("name") if isinstance(call, dict) else None
    return name.strip() if isinstance(name, str) and why_unusable(name) is None else ""


def guess_name(inner: str) -> str:
    """The name in a call that is no valid JSON; empty where none can be seen."""
    match = _NAME.search(inner)
    return match[1] if match else ""


def dump(value: Any) -> str:
    """JSON as chat templates write it."""
    return json.dumps(value, ensure_ascii=False)


def _kind(value: Any) -> str:
    names: Mapping[type, str] = {list: "a list", dict: "an object", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is out of range")
    return value


_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse_constant, parse_float=_finite)
