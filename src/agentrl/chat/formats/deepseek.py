r"""DeepSeek V3, R1 and V3.1: one block per call between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>`.

V3, R1   <｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n{"query": "x"}\n```<｜tool▁call▁end｜>
V3.1     <｜tool▁call▁begin｜>search<｜tool▁sep｜>{"query": "x"}<｜tool▁call▁end｜>
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentrl.chat.formats.interface import CallBlock, CallFormat, failed
from agentrl.chat.formats.json_calls import decode_call, dump, request_with
from agentrl.types import ToolRequest, ToolSpec

_SECTION, _SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGIN, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_BORDER = re.compile(f"{_BEGIN}|{_END}|{_SECTION_END}")
_V31 = re.compile(rf"\s*(?P<name>[^<>]{{1,200}}?)\s*{_SEPARATOR}\s*(?=\{{)")
_V3 = re.compile(
    rf"[^<>]{{0,200}}{_SEPARATOR}[ \t]*(?P<name>[^<>\s`{{]{{1,200}})\s*(?:```(?:json)?\s*|(?=\{{)|(?<=\n)|\Z)"
)
_FENCE_END = re.compile(r"\s*```")


class _DeepSeekFormat(CallFormat):
    """What the versions share: both forms are read, whatever the version."""

    opens = re.compile(_BEGIN)
    frame = (_SECTION, _SECTION_END)

    def read(self, text: str, opening: re.Match[str], *, tools: Sequence[ToolSpec]) -> CallBlock:
        """One call; one without an end marker counts if its JSON is complete."""
        header = _V31.match(text, opening.end()) or _V3.match(text, opening.end())
        if header is None:
            reason = f"the tool call has no name before its arguments; {self.how}"
            return _unreadable(text, opening, name="", reason=reason)
        name = header["name"].strip()
        decoded = decode_call(text, header.end(), opens=self.opens, border=_BORDER, how=self.how)
        if isinstance(decoded, str):
            return _unreadable(text, opening, name=name, reason=decoded)
        arguments, json_end = decoded
        fence = _FENCE_END.match(text, json_end)
        border = _BORDER.search(text, json_end)
        if border is None or border[0] == _BEGIN:
            end = fence.end() if fence else json_end
            return CallBlock(end=end, text_end=json_end, requests=(request_with(name, arguments),))
        rest = text[fence.end() if fence else json_end : border.start()].strip()
        request = request_with(name, arguments)
        if rest:
            request = failed(
                name=name, error=f"unexpected text after the arguments of {name}: {rest[:80]!r}; {self.how}"
            )
        return CallBlock(end=border.end(), text_end=json_end, requests=(request,))


def _unreadable(text: str, opening: re.Match[str], *, name: str, reason: str) -> CallBlock:
    border = _BORDER.search(text, opening.end())
    end = len(text) if border is None else border.start() if border[0] == _BEGIN else border.end()
    return CallBlock(end=end, text_end=opening.end(), requests=(failed(name=name, error=reason),))


class DeepSeekV3Format(_DeepSeekFormat):
    """Arguments in a fence."""

    how = (
        f"write {_SECTION}, then per call {_BEGIN}function{_SEPARATOR}NAME, a line break and the arguments as one JSON "
        f"object in a ```json fence, then {_END}, at last {_SECTION_END}"
    )

    def render(self, calls: Sequence[ToolRequest], *, tools: Sequence[ToolSpec]) -> str:
        """One section."""
        blocks = [
            f"{_BEGIN}function{_SEPARATOR}{call.name}\n```json\n{dump(call.arguments)}\n```{_END}" for call in calls
        ]
        return _SECTION + "\n".join(blocks) + _SECTION_END


class DeepSeekV31Format(_DeepSeekFormat):
    """Arguments right behind the separator."""

    how = (
        f"write {_SECTION}, then per call {_BEGIN}NAME{_SEPARATOR}, the arguments as one JSON object and {_END}, "
        f"at last {_SECTION_END}"
    )

    def render(self, calls: Sequence[ToolRequest], *, tools: Sequence[ToolSpec]) -> str:
        """One section."""
        blocks = [f"{_BEGIN}{call.name}{_SEPARATOR}{dump(call.arguments)}{_END}" for call in calls]
        return _SECTION + "".join(blocks) + _SECTION_END
