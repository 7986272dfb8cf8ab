"""Python calls as models write them, `search(query="x", limit=3)`, read without running or compiling anything. Pure.

Names may hold dots and dashes or be Python keywords, `true`, `false` and `null` count as constants, and
`**{"odd name": 1}` gives arguments whose names are no identifiers: what tools are called with is not up to Python.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.chat.formats.interface import failed
from agentrl.types import ToolRequest

NAME = r"\w[\w.\-]*"

_MAX_DEPTH = 64
_CONSTANTS: Mapping[str, Any] = {
    "True": True, "False": False, "None": None, "true": True, "false": False, "null": None,
}  # fmt: skip
_SPACE = re.compile(r"\s*")
_CALL = re.compile(rf"({NAME})\s*\(\s*")
_KEYWORD = re.compile(rf"({NAME})\s*=(?!=)\s*")
_WORD = re.compile(r"[^\W\d]\w*")
_STRING = re.compile(
    r"""(?P<prefix>[rRuU]?)(?P<quote>"{3}|'{3}|"|')(?P<body>(?:(?!(?P=quote))[^\\]|\\.)*+)(?P=quote)""", re.DOTALL
)
_NUMBER = re.compile(r"[+-]?(?:0[xX][0-9a-fA-F]+|(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)")
_ESCAPE = re.compile(
    r"\\(?:(\n)|([\\'\"abfnrtv])|([0-7]{1,3})|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|N\{([^}]*)\})"
)
_CONTROL = dict(zip("\\'\"abfnrtv", "\\'\"\a\b\f\n\r\t\v", strict=True))
_IDENTIFIER = re.compile(rf"{NAME}\Z")


class PythonCallError(ValueError):
    """The text is no call with literal arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonCalls:
    """Calls one after the other. `failure` is where the first unreadable one begins, if one does."""

    requests: tuple[ToolRequest, ...]
    end: int
    failure: int | None


def read_calls(text: str, start: int, *, is_list: bool, how: str) -> PythonCalls:
    """Calls separated by `,`, `;` or space; with `is_list` up to the `]` that must follow the last one.

    The first call that cannot be read ends the reading: it becomes the last request.
    """
    requests: list[ToolRequest] = []
    position = _skip(text, start)
    while not (is_list and text.startswith("]", position)):
        called = _CALL.match(text, position)
        if called is None and requests and not is_list:
            break
        try:
            if called is None:
                raise PythonCallError("expected a call such as name(argument=value)")
            arguments, end = _arguments(text, called.end())
        except (ValueError, RecursionError) as error:
            reason = f"the tool call cannot be read: {error}; {how}"
            requests.append(failed(name=called[1] if called else "", error=reason))
            return PythonCalls(requests=tuple(requests), end=position, failure=position)
        requests.append(ToolRequest(call_id="", name=called[1], arguments=arguments))
        position = _skip(text, end)
        if text.startswith((",", ";"), position):
            position = _skip(text, position + 1)
    return PythonCalls(requests=tuple(requests), end=position + is_list, failure=None)


def render_call(call: ToolRequest) -> str:
    """`name(argument=value)`. Raises ValueError where the name cannot be written."""
    if not _IDENTIFIER.match(call.name):
        raise ValueError(f"tool name {call.name!r}: a Python call has letters, digits, '_', '.' and '-' in its name")
    named = {key: value for key, value in call.arguments.items() if _IDENTIFIER.match(key)}
    odd = {key: value for key, value in call.arguments.items() if key not in named}
    parts = [f"{key}={_render(value)}" for key, value in named.items()]
    return f"{call.name}({', '.join([*parts, f'**{_render(odd)}'] if odd else parts)})"


def _arguments(text: str, position: int) -> tuple[dict[str, Any], int]:
    """The arguments from behind `(`, and where the call ends. Raises PythonCallError, ValueError, RecursionError."""
    arguments: dict[str, Any] = {}
    while not text.startswith(")", position):
        keyword = _KEYWORD.match(text, position)
        if keyword is not None:
            value, position = _value(text, keyword.end(), depth=0)
            given = {keyword[1]: value}
        elif text.startswith("**", position):
            given, position = _value(text, _skip(text, position + 2), depth=0)
            if not isinstance(given, dict):
                raise PythonCallError("** needs a dictionary")
        else:
            raise PythonCallError(_complaint(text, position, expected="an argument of the form name=value"))
        twice = given.keys() & arguments.keys()
        if twice:
            raise PythonCallError(f"argument {min(twice)} is given twice")
        arguments |= given
        position = _after_item(text, position, closing=")")
    return arguments, position + 1


def _value(text: str, position: int, *, depth: int) -> tuple[Any, int]:
    """The literal at `position`, and where it ends."""
    if depth > _MAX_DEPTH:
        raise PythonCallError(f"more than {_MAX_DEPTH} brackets inside each other")
    first = text[position : position + 1]
    if first in {"[", "("}:
        return _items(text, position + 1, closing="]" if first == "[" else ")", depth=depth + 1)
    if first == "{":
        return _dictionary(text, position + 1, depth=depth + 1)
    string = _STRING.match(text, position)
    if string is not None:
        return _strings(text, string)
    number = _NUMBER.match(text, position)
    if number is not None:
        return _number(number[0]), number.end()
    word = _WORD.match(text, position)
    if word is None or word[0] not in _CONSTANTS:
        raise PythonCallError(_complaint(text, position, expected="a literal value"))
    return _CONSTANTS[word[0]], word.end()


def _items(text: str, position: int, *, closing: str, depth: int) -> tuple[list[Any], int]:
    items: list[Any] = []
    position = _skip(text, position)
    while not text.startswith(closing, position):
        value, position = _value(text, position, depth=depth)
        items.append(value)
        position = _after_item(text, position, closing=closing)
    return items, position + 1


def _dictionary(text: str, position: int, *, depth: int) -> tuple[dict[str, Any], int]:
    entries: dict[str, Any] = {}
    position = _skip(text, position)
    while not text.startswith("}", position):
        key, position = _value(text, position, depth=depth)
        if not isinstance(key, str):
            raise PythonCallError("the keys of a dictionary must be strings")
        position = _skip(text, position)
        if not text.startswith(":", position):
            raise PythonCallError(_complaint(text, position, expected="':'"))
        entries[key], position = _value(text, _skip(text, position + 1), depth=depth)
        position = _after_item(text, position, closing="}")
    return entries, position + 1


def _after_item(text: str, position: int, *, closing: str) -> int:
    """Where the next item or the closing bracket stands."""
    position = _skip(text, position)
    if text.startswith(",", position):
        return _skip(text, position + 1)
    if text.startswith(closing, position):
        return position
    raise PythonCallError(_complaint(text, position, expected=f"',' or '{closing}'"))


def _strings(text: str, string: re.Match[str]) -> tuple[str, int]:
    """Adjacent string literals are one, as in Python."""
    parts: list[str] = []
    following: re.Match[str] | None = string
    end = string.end()
    while following is not None:
        is_raw = following["prefix"] in {"r", "R"}
        parts.append(following["body"] if is_raw else _ESCAPE.sub(_unescaped, following["body"]))
        end = following.end()
        following = _STRING.match(text, _skip(text, end))
    joined = "".join(parts)
    # JSON writes characters beyond U+FFFF as two escapes; halves that find no partner are refused by the caller.
    return joined.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass"), end


def _unescaped(match: re.Match[str]) -> str:
    newline, control, octal, *hexadecimal, name = match.groups()
    code = next(filter(None, hexadecimal), None)
    if newline:
        return ""
    if control:
        return _CONTROL[control]
    if name is not None:
        return _named_character(name)
    number = int(code, 16) if code else int(octal, 8)
    if number > 0x10FFFF:
        raise PythonCallError(f"{match[0]} is no character")
    return chr(number)


def _named_character(name: str) -> str:
    try:
        return unicodedata.lookup(name)
    except KeyError:
        raise PythonCallError(f"there is no character named {name[:40]!r}") from None


def _number(digits: str) -> int | float:
    if "x" in digits.lower():
        return int(digits, 16)
    if not set(digits) & set(".eE"):
        return int(digits)
    value = float(digits)
    if not math.isfinite(value):
        raise PythonCallError(f"{digits} is out of range")
    return value


def _render(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, Mapping):
        return (
            "{"
            + ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {_render(entry)}" for key, entry in value.items())
            + "}"
        )
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_render, value))}]"
    return json.dumps(value, ensure_ascii=False)  # strings and numbers are the same in both languages


def _complaint(text: str, position: int, *, expected: str) -> str:
    rest = text[position : position + 20]
    return f"expected {expected} before {rest!r}" if rest else f"it is cut off where {expected} should follow"


def _skip(text: str, position: int) -> int:
    space = _SPACE.match(text, position)
    return space.end() if space else position
