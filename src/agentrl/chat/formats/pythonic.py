"""Llama 4 and others: `[search(query="x"), add(a=1, b=2)]`, between `<|python_start|>` and `<|python_end|>` or bare."""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentrl.chat.formats.interface import CallBlock, CallFormat
from agentrl.chat.formats.json_calls import after_space
from agentrl.chat.formats.python_calls import NAME, read_calls, render_call
from agentrl.types import ToolRequest, ToolSpec

LIST_OPENS = rf"\[\s*{NAME}\s*\("
_END = re.compile(r"\s*<\|python_end\|>")


class PythonicFormat(CallFormat):
    """A Python list of calls. Without the marker it counts where a line begins with it."""

    opens = re.compile(
        rf"(?P<marker><\|python_start\|>)|(?:^[ \t]*|(?<=</think>)\s*)(?P<bare>{LIST_OPENS})", re.MULTILINE
    )
    how = 'write a list of calls with literal arguments: [name(argument="value", other=1)]'

    def read(self, text: str, opening: re.Match[str], *, tools: Sequence[ToolSpec]) -> CallBlock:
        """All calls of the list; behind a call that cannot be read nothing of the list counts."""
        start = opening.start("bare") if opening["bare"] else opening.end()
        return read_list(text, start, opening=opening, border=self.opens, how=self.how)

    def render(self, calls: Sequence[ToolRequest], *, tools: Sequence[ToolSpec]) -> str:
        """One list."""
        return f"[{', '.join(map(render_call, calls))}]"


def read_list(text: str, start: int, *, opening: re.Match[str], border: re.Pattern[str], how: str) -> CallBlock:
    """The list of calls at `start`, space before it allowed."""
    begin = after_space(text, start)
    is_list = text.startswith("[", begin)
    calls = read_calls(text, begin + is_list, is_list=is_list, how=how)
    if calls.failure is None:
        end = _END.match(text, calls.end)
        return CallBlock(end=end.end() if end else calls.end, text_end=calls.end, requests=calls.requests)
    end_of_failed = end_of_unreadable(text, max(calls.failure, opening.end()), border=border)
    return CallBlock(end=end_of_failed, text_end=opening.end(), requests=calls.requests)


def end_of_unreadable(text: str, start: int, *, border: re.Pattern[str]) -> int:
    """Where the text of an unreadable call without an end marker ends: at the next call, an empty line, or the end."""
    following = border.search(text, start)
    end = len(text) if following is None else following.start()
    empty_line = text.find("\n\n", start, end)
    return end if empty_line < 0 else empty_line
