"""Qwen3-Coder: every argument in a tag of its own, as bare text whose type the tool's schema tells.

<tool_call>
<function=search>
<parameter=query>
capital of France
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from agentrl.chat.formats.interface import CallBlock, CallFormat, failed
from agentrl.chat.formats.json_calls import after_space, dump
from agentrl.chat.formats.schema_types import value_of
from agentrl.types import ToolRequest, ToolSpec

_FUNCTION = re.compile(r"\s*<function=(?P<name>[^<>\s]{1,200})>")
_PARAMETER = re.compile(r"\s*<parameter=(?P<name>[^<>]{1,200})>")
_VALUE_END = re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>))")
_FUNCTION_END = "</function>"
_CALL_END = re.compile(r"\s*</tool_call>")
_BORDER = re.compile(r"</?tool_call>")
_WRITABLE_NAME = re.compile(r"[^<>\s]{1,200}\Z")


class Qwen3CoderFormat(CallFormat):
    """A call counts without its `<tool_call>` tags: the models often leave them out."""

    opens = re.compile(r"<tool_call>|<function=(?=[^<>\s]{1,200}>)")
    how = (
        "write <tool_call><function=NAME>, every argument as <parameter=ARGUMENT>value</parameter>, then "
        "</function></tool_call>"
    )

    def read(self, text: str, opening: re.Match[str], *, tools: Sequence[ToolSpec]) -> CallBlock:
        """One call. `</parameter>` ends a value only where another parameter or the end of the function follows."""
        has_tag = opening[0] == "<tool_call>"
        function = _FUNCTION.match(text, opening.end() if has_tag else opening.start())
        if function is None:
            return self._unreadable(text, opening, name="", reason="<function=NAME> is missing")
        name = function["name"]
        tool = next((tool for tool in tools if tool.name == name), None)
        arguments: dict[str, Any] = {}
        position = function.end()
        while (parameter := _PARAMETER.match(text, position)) is not None:
            end = _next_value_end(text, parameter.end())
            if end is None:
                reason = f"the parameter {parameter['name']} is not closed"
                return self._unreadable(text, opening, name=name, reason=reason)
            value = _without_line_breaks(text[parameter.end() : end])
            arguments[parameter["name"]] = value_of(value, argument=parameter["name"], tool=tool)
            position = end + len("</parameter>")
        position = after_space(text, position)
        if not text.startswith(_FUNCTION_END, position):
            found = f"{_FUNCTION_END} is missing before {text[position : position + 20]!r}"
            return self._unreadable(text, opening, name=name, reason=found)
        position += len(_FUNCTION_END)
        closing = _CALL_END.match(text, position)
        end = closing.end() if closing else position
        return CallBlock(end=end, text_end=end, requests=(ToolRequest(call_id="", name=name, arguments=arguments),))

    def _unreadable(self, text: str, opening: re.Match[str], *, name: str, reason: str) -> CallBlock:
        border = _BORDER.search(text, opening.end())
        end = len(text) if border is None else border.end() if border[0] == "</tool_call>" else border.start()
        request = failed(name=name, error=f"the tool call cannot be read: {reason}; {self.how}")
        return CallBlock(end=end, text_end=opening.end(), requests=(request,))

    def render(self, calls: Sequence[ToolRequest], *, tools: Sequence[ToolSpec]) -> str:
        """One block per call.

        Raises ValueError for a name or a text that the format cannot hold: it has no escapes.
        """
        return "\n".join(_render_one(call) for call in calls)


def _render_one(call: ToolRequest) -> str:
    for name in (call.name, *call.arguments):
        if not _WRITABLE_NAME.match(name):
            raise ValueError(f"{name!r} cannot stand in a tag: names have no '<', '>' or space")
    parameters = [f"<parameter={name}>\n{_text_of(value)}\n</parameter>\n" for name, value in call.arguments.items()]
    return f"<tool_call>\n<function={call.name}>\n{''.join(parameters)}</function>\n</tool_call>"


def _text_of(value: Any) -> str:
    text = value if isinstance(value, str) else dump(value)
    if _VALUE_END.search(text + "\n</parameter>\n</function>").start() != len(text) + 1:  # type: ignore[union-attr]
        raise ValueError("the text looks like the end of its parameter, which this format cannot escape")
    return text


def _next_value_end(text: str, start: int) -> int | None:
    ends = _value_ends(text)
    index = bisect_left(ends, start)
    return ends[index] if index < len(ends) else None


@lru_cache(maxsize=1)
def _value_ends(text: str) -> list[int]:
    """Where values end. Found once per text: a model stuck repeating an opening tag must cost linear time."""
    return [match.start() for match in _VALUE_END.finditer(text)]


def _without_line_breaks(value: str) -> str:
    """The template puts every value on lines of its own."""
    return value.removeprefix("\n").removesuffix("\n") if value != "\n" else ""
