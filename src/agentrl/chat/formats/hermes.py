"""Qwen 2.5, Qwen 3, Hermes: `<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>`, one block per call."""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentrl.chat.formats.interface import CallBlock, CallFormat, failed
from agentrl.chat.formats.json_calls import decode, dump, guess_name, name_in, request_of, why_unreadable
from agentrl.types import ToolRequest, ToolSpec

_CLOSE = "</tool_call>"
_BORDER = re.compile(r"</?tool_call>")


class HermesFormat(CallFormat):
    """JSON between tags."""

    opens = re.compile("<tool_call>")
    how = 'write one JSON object {"name": ..., "arguments": {...}} between <tool_call> and </tool_call>'

    def read(self, text: str, opening: re.Match[str], *, tools: Sequence[ToolSpec]) -> CallBlock:
        """One call; one without `</tool_call>` counts if its JSON is complete."""
        body = opening.end()
        try:
            call, json_end = decode(text, body, border=self.opens)
        except (ValueError, RecursionError) as error:
            end, is_closed = _border(text, body)
            inner = text[body : end - len(_CLOSE) if is_closed else end]
            reason = why_unreadable(error, inner, how=self.how)
            return CallBlock(end=end, text_end=body, requests=(failed(name=guess_name(inner), error=reason),))
        end, is_closed = _border(text, json_end)
        if not is_closed:
            return CallBlock(end=json_end, text_end=json_end, requests=(request_of(call, how=self.how),))
        rest = text[json_end : end - len(_CLOSE)].strip()
        request = request_of(call, how=self.how)
        if rest:
            reason = f"unexpected text after the JSON object of the tool call: {rest[:80]!r}; {self.how}"
            request = failed(name=name_in(call), error=reason)
        return CallBlock(end=end, text_end=json_end, requests=(request,))

    def render(self, calls: Sequence[ToolRequest], *, tools: Sequence[ToolSpec]) -> str:
        """One block per call."""
        return "\n".join(
            f"<tool_call>\n{dump({'name': call.name, 'arguments': call.arguments})}\n{_CLOSE}" for call in calls
        )


def _border(text: str, start: int) -> tuple[int, bool]:
    """Where a block whose JSON does not reach beyond `start` ends, and whether a closing tag ends it."""
    match = _BORDER.search(text, start)
    if match is None:
        return len(text), False
    is_closed = match[0] == _CLOSE
    return (match.end() if is_closed else match.start()), is_closed
