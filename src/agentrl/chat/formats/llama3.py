"""Llama 3.1 to 3.3: `<|python_tag|>{"name": "f", "parameters": {"x": 1}}`, several separated by `;`, or bare JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentrl.chat.formats.interface import CallBlock, CallFormat
from agentrl.chat.formats.json_calls import dump, read_sequence
from agentrl.chat.formats.pythonic import LIST_OPENS, end_of_unreadable, read_list
from agentrl.types import ToolRequest, ToolSpec

_TAG = "<|python_tag|>"
_PYTHON_LIST = re.compile(rf"\s*{LIST_OPENS}")
_KEYS = r'"(?:name"\s*:\s*"|type"\s*:\s*"function")'


class Llama3Format(CallFormat):
    """JSON behind a marker. Without the marker it counts where a line begins with `{"name": "`."""

    opens = re.compile(
        rf"(?P<marker>{re.escape(_TAG)})|(?:^[ \t]*|(?<=</think>)\s*)(?P<bare>(?:\[\s*)?\{{)(?=\s*{_KEYS})",
        re.MULTILINE,
    )
    how = f'write {_TAG} and one JSON object {{"name": ..., "parameters": {{...}}}} per call, separated by ";"'

    def read(self, text: str, opening: re.Match[str], *, tools: Sequence[ToolSpec]) -> CallBlock:
        """All calls behind the marker; a Python list of calls is read, too, as Llama 4 writes it there."""
        if opening["marker"] and _PYTHON_LIST.match(text, opening.end()):
            return read_list(text, opening.end(), opening=opening, border=self.opens, how=self.how)
        start = opening.start("bare") if opening["bare"] else opening.end()
        calls = read_sequence(text, start, border=self.opens, how=self.how)
        if calls.failure is None:
            return CallBlock(end=calls.end, text_end=calls.end, requests=calls.requests)
        end = end_of_unreadable(text, max(calls.failure, opening.end()), border=self.opens)
        return CallBlock(end=end, text_end=opening.end(), requests=calls.requests)

    def render(self, calls: Sequence[ToolRequest], *, tools: Sequence[ToolSpec]) -> str:
        """One marker, then the calls."""
        return _TAG + "; ".join(dump({"name": call.name, "parameters": call.arguments}) for call in calls)
