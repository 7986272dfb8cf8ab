"""MiniCPM: Python calls between `<|tool_call_start|>` and `<|tool_call_end|>`, usually in a ```python fence."""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentrl.chat.formats.interface import CallBlock, CallFormat
from agentrl.chat.formats.python_calls import read_calls, render_call
from agentrl.types import ToolRequest, ToolSpec

_START, _END = "<|tool_call_start|>", "<|tool_call_end|>"
_BEFORE = re.compile(r"\s*(?:```(?:python|py)?(?=\s))?\s*(?P<list>\[)?")
_AFTER = re.compile(r"\s*(?:```)?\s*<\|tool_call_end\|>")
_BORDER = re.compile(r"<\|tool_call_(?:start|end)\|>")


class MiniCpmFormat(CallFormat):
    """Several calls in one block, one a line or in a list."""

    opens = re.compile(re.escape(_START))
    how = f'write calls with literal arguments, name(argument="value"), between {_START} and {_END}'
    thinking_tags = (*CallFormat.thinking_tags, ("<|thought_start|>", "<|thought_end|>"))

    def read(self, text: str, opening: re.Match[str], *, tools: Sequence[ToolSpec]) -> CallBlock:
        """All calls of the block; behind a call that cannot be read nothing of the block counts."""
        before = _BEFORE.match(text, opening.end())
        start = before.end() if before else opening.end()
        is_list = before is not None and before["list"] is not None
        calls = read_calls(text, start, is_list=is_list, how=self.how)
        if calls.failure is None:
            after = _AFTER.match(text, calls.end)
            return CallBlock(end=after.end() if after else calls.end, text_end=calls.end, requests=calls.requests)
        border = _BORDER.search(text, max(calls.failure, opening.end()))
        end = len(text) if border is None else border.end() if border[0] == _END else border.start()
        return CallBlock(end=end, text_end=opening.end(), requests=calls.requests)

    def render(self, calls: Sequence[ToolRequest], *, tools: Sequence[ToolSpec]) -> str:
        """One fenced block."""
        lines = "\n".join(map(render_call, calls))
        return f"{_START}\n```python\n{lines}\n```\n{_END}"
