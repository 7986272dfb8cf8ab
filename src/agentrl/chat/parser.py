"""What a completion says: reasoning, visible text, tool calls. Pure; never raises, whatever the text.

    <think> plan </think> Let me look. <tool_call> {"name": "search", "arguments": {"q": "x"}} </tool_call>
            ^reasoning    ^content                 ^one ToolRequest

How calls look is the business of a `CallFormat`. A call that cannot be read becomes a ToolRequest with `error`, a
sentence the model can act on, so that the loop can answer it instead of dropping it. Tags inside a complete call are
text, not tags.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from agentrl.chat.formats import CallBlock, CallFormat, get_call_format
from agentrl.chat.formats.interface import failed
from agentrl.types import ToolRequest, ToolSpec, why_unusable

_HERMES = get_call_format("hermes")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCompletion:
    """A completion taken apart. `tool_calls` keeps the model's order, unreadable calls included."""

    reasoning: str
    content: str
    tool_calls: tuple[ToolRequest, ...]


def parse_completion(
    text: str, *, call_format: CallFormat = _HERMES, tools: Sequence[ToolSpec] = ()
) -> ParsedCompletion:
    """Take a completion apart.

    Reasoning is everything before the last `</think>`, with or without an opening tag; after it, an unclosed `<think>`
    hides the rest. Only the visible part is searched for tool calls. Both texts are stripped of surrounding space.
    `tools` gives the types of arguments to formats that do not write them.
    """
    reasoning, visible = _split_reasoning(text, call_format=call_format)
    kept: list[str] = []
    requests: list[ToolRequest] = []
    position = 0
    for start, block in _blocks(visible, call_format=call_format, tools=tools):
        kept.append(visible[position:start])
        requests += block.requests
        position = block.end
    kept.append(visible[position:])
    content = "".join(_without_frame(part, frame=call_format.frame) for part in kept).strip()
    calls = tuple(_numbered(request, index=index) for index, request in enumerate(requests))
    return ParsedCompletion(reasoning=reasoning, content=content, tool_calls=calls)


def _split_reasoning(text: str, *, call_format: CallFormat) -> tuple[str, str]:
    opening, closing = zip(*call_format.thinking_tags, strict=True)
    close = close_end = -1
    unclosed = -1  # position of the first opening tag after the last closing one
    for position, tag in _thinking_tags(text, call_format=call_format):
        if tag in closing:
            close, close_end, unclosed = position, position + len(tag), -1
        elif unclosed < 0:
            unclosed = position
    before = text[:close] if close >= 0 else ""
    start = close_end if close >= 0 else 0
    hidden = text[unclosed:] if unclosed >= 0 else ""
    visible = text[start:unclosed] if unclosed >= 0 else text[start:]
    thoughts = (_without_prefix(part.strip(), prefixes=opening).strip() for part in (before, hidden))
    return "\n".join(filter(None, thoughts)), visible


def _thinking_tags(text: str, *, call_format: CallFormat) -> Iterator[tuple[int, str]]:
    """Thinking tags in order, without those that are text inside a complete call."""
    tags = _any_of([tag for pair in call_format.thinking_tags for tag in pair])
    tag, call = tags.search(text), call_format.opens.search(text)
    while tag is not None:
        if call is None or tag.start() < call.start():
            yield tag.start(), tag[0]
            tag = tags.search(text, tag.end())
            continue
        end = max(call.end(), call_format.read(text, call, tools=()).text_end)
        if tag.start() < end:
            tag = tags.search(text, end)
        call = call_format.opens.search(text, end)


def _blocks(text: str, *, call_format: CallFormat, tools: Sequence[ToolSpec]) -> Iterator[tuple[int, CallBlock]]:
    position = 0
    while (opening := call_format.opens.search(text, position)) is not None:
        block = call_format.read(text, opening, tools=tools)
        yield opening.start(), block
        position = max(block.end, opening.end())


def _numbered(request: ToolRequest, *, index: int) -> ToolRequest:
    reason = why_unusable([request.name, request.arguments, request.error])
    if reason is not None:
        request = failed(error=f"the tool call {reason}")
    return replace(request, call_id=f"call_{index}")


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)))


def _without_frame(text: str, *, frame: Sequence[str]) -> str:
    for marker in frame:
        text = text.replace(marker, "")
    return text


def _without_prefix(text: str, *, prefixes: Sequence[str]) -> str:
    prefix = next((prefix for prefix in prefixes if text.startswith(prefix)), "")
    return text.removeprefix(prefix)
