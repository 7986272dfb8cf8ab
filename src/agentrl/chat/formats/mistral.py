"""Mistral: `[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}]`; newer models `[TOOL_CALLS]f[ARGS]{"x": 1}`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentrl.chat.formats.interface import CallBlock, CallFormat, failed
from agentrl.chat.formats.json_calls import decode, dump, read_sequence, request_with, why_unreadable
from agentrl.chat.formats.pythonic import end_of_unreadable
from agentrl.types import ToolRequest, ToolSpec

_MARKER = "[TOOL_CALLS]"
_COMPACT = re.compile(r"\s*(?P<name>[^\s\[\]{}]{1,200})\s*(?:\[CALL_ID\][^\s\[{]{0,100}\s*)?(?:\[ARGS\]|(?=\{)|\Z)")


class MistralFormat(CallFormat):
    """A JSON list behind a marker, or one marker, name and JSON object per call."""

    opens = re.compile(re.escape(_MARKER))
    how = f'write {_MARKER} and a JSON list of calls: [{{"name": ..., "arguments": {{...}}}}]'
    thinking_tags = (*CallFormat.thinking_tags, ("[THINK]", "[/THINK]"))

    def read(self, text: str, opening: re.Match[str], *, tools: Sequence[ToolSpec]) -> CallBlock:
        """All calls of the list; behind a call that cannot be read nothing of the list counts."""
        compact = _COMPACT.match(text, opening.end())
        if compact is not None:
            return self._read_compact(text, compact)
        calls = read_sequence(text, opening.end(), border=self.opens, how=self.how)
        if calls.failure is None:
            return CallBlock(end=calls.end, text_end=calls.end, requests=calls.requests)
        end = end_of_unreadable(text, max(calls.failure, opening.end()), border=self.opens)
        return CallBlock(end=end, text_end=opening.end(), requests=calls.requests)

    def _read_compact(self, text: str, compact: re.Match[str]) -> CallBlock:
        try:
            arguments, end = decode(text, compact.end(), border=self.opens)
        except (ValueError, RecursionError) as error:
            end = end_of_unreadable(text, compact.end(), border=self.opens)
            inner = text[compact.end() : end]
            reason = why_unreadable(error, inner, how=self.how)
            return CallBlock(end=end, text_end=compact.start(), requests=(failed(name=compact["name"], error=reason),))
        return CallBlock(end=end, text_end=end, requests=(request_with(compact["name"], arguments),))

    def render(self, calls: Sequence[ToolRequest], *, tools: Sequence[ToolSpec]) -> str:
        """One list."""
        return f"{_MARKER} {dump([{'name': call.name, 'arguments': call.arguments} for call in calls])}"
