"""Tools explained in the system message, where no chat template does it, and their results as user messages. Pure.

Used for formats that no template writes: MiroRL's XML.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from agentrl.chat.formats import CALL_FORMATS, CallFormat
from agentrl.chat.formats.json_calls import dump
from agentrl.chat.formats.mirorl import address_of
from agentrl.chat.parser import parse_completion
from agentrl.chat.template import ChatTemplate
from agentrl.errors import ConfigError
from agentrl.types import ToolSpec

_PROBE = ToolSpec(
    name="probe_tool",
    description="A probe.",
    parameters={"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
)
_PROBE_CALL = {
    "id": "probecall",  # nine letters and digits: some templates insist on it
    "type": "function",
    "function": {"name": _PROBE.name, "arguments": {"text": "probe"}},
}


def check_template_agrees(template: ChatTemplate, *, call_format: CallFormat) -> None:
    """Refuse a format that is not the one in which the template writes calls, where that is a known one.

    A model that sees its own calls in one form and is answered for another learns nothing.

    Raises:
        ConfigError: the template's calls are written in another format, which it names.
    """
    text = _rendered(
        template, [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL]}]
    )
    if not text or _reads_probe(text, call_format=call_format):
        return
    written = [name for name, other in CALL_FORMATS.items() if _reads_probe(text, call_format=other)]
    if written:
        chosen = next(name for name, other in CALL_FORMATS.items() if other is call_format)
        raise ConfigError(
            f"tool_call_parser = {chosen!r}: the chat template writes calls as {written[0]!r} reads them; "
            f"set --tool_call_parser {written[0]}, or give the other template with --chat_template"
        )


def explain_tools(
    messages: Sequence[Mapping[str, Any]], *, tools: Sequence[ToolSpec], call_format: CallFormat
) -> list[Mapping[str, Any]]:
    """The conversation with an explanation of the tools at the end of its system message, which is added if missing."""
    explanation = _explanation(tools, call_format=call_format)
    if messages and messages[0].get("role") == "system":
        head = {**messages[0], "content": f"{messages[0].get('content', '')}\n\n{explanation}"}
        return [head, *messages[1:]]
    return [{"role": "system", "content": explanation}, *messages]


def results_as_user(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The conversation with each run of tool messages as one user message, joined with one that follows."""
    joined: list[Mapping[str, Any]] = []
    for is_result, run in groupby(messages, key=lambda message: message.get("role") == "tool"):
        if is_result:
            results = [f"Result of {message.get('name', 'the tool')}:\n{message.get('content', '')}" for message in run]
            joined.append({"role": "user", "content": "\n\n".join(results)})
            continue
        following = list(run)
        if joined and joined[-1]["role"] == "user" and following[0].get("role") == "user":
            joined[-1] = {"role": "user", "content": f"{joined[-1]['content']}\n\n{following.pop(0)['content']}"}
        joined += following
    return joined


def _explanation(tools: Sequence[ToolSpec], *, call_format: CallFormat) -> str:
    parts = [f"You can call these tools. To call one, {call_format.how}. You get the results in the next message."]
    for server, group in groupby(tools, key=lambda tool: address_of(tool)[0]):
        parts.append(f"## Server: {server}")
        for tool in group:
            schema = f"JSON schema of the arguments: {dump(tool.parameters)}"
            parts.append(f"### Tool: {address_of(tool)[1]}\n{tool.description}\n{schema}")
    return "\n\n".join(parts)


def _rendered(template: ChatTemplate, messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of a conversation with the probe; empty where the template refuses it."""
    try:
        return template.render(messages, tools=[_PROBE.as_openai()], add_generation_prompt=False)
    except ConfigError:
        return ""


def _reads_probe(text: str, *, call_format: CallFormat) -> bool:
    calls = parse_completion(text, call_format=call_format, tools=[_PROBE]).tool_calls
    return any((call.name, call.arguments) == (_PROBE.name, {"text": "probe"}) for call in calls)
