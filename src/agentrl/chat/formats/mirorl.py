"""MiroRL: `<use_mcp_tool>` with server, tool and JSON arguments. No chat template writes it: the prompt explains it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentrl.chat.formats.interface import CallBlock, CallFormat, failed
from agentrl.chat.formats.json_calls import decode_call, dump, request_with
from agentrl.types import ToolRequest, ToolSpec

DEFAULT_SERVER = "tools"
"""How tools without a server are addressed."""

_HEADER = re.compile(
    r"\s*<server_name>(?P<server>[^<>]{1,200})</server_name>\s*<tool_name>(?P<tool>[^<>]{1,200})</tool_name>"
    r"\s*(?P<arguments><arguments>\s*)?"
)
_EMPTY = re.compile(r"(?:</arguments>\s*)?(?=</use_mcp_tool>)")
_BORDER = re.compile(r"</?use_mcp_tool>")
_CLOSE = "</use_mcp_tool>"


class MiroRlFormat(CallFormat):
    """One XML block per call."""

    opens = re.compile("<use_mcp_tool>")
    how = (
        "write <use_mcp_tool><server_name>SERVER</server_name><tool_name>TOOL</tool_name>"
        "<arguments>JSON object</arguments></use_mcp_tool>"
    )
    describes_tools = True

    def read(self, text: str, opening: re.Match[str], *, tools: Sequence[ToolSpec]) -> CallBlock:
        """One call; one without its closing tags counts if its JSON is complete."""
        header = _HEADER.match(text, opening.end())
        if header is None:
            reason = f"the tool call must name <server_name> and <tool_name>; {self.how}"
            return _unreadable(text, opening, name="", reason=reason)
        name = _tool_name(header["server"].strip(), header["tool"].strip(), tools=tools)
        empty = _EMPTY.match(text, header.end())
        if empty is not None:
            end = empty.end() + len(_CLOSE)
            return CallBlock(end=end, text_end=end, requests=(request_with(name, None),))
        decoded = decode_call(text, header.end(), opens=self.opens, border=_BORDER, how=self.how)
        if isinstance(decoded, str):
            return _unreadable(text, opening, name=name, reason=decoded)
        arguments, json_end = decoded
        border = _BORDER.search(text, json_end)
        is_closed = border is not None and border[0] == _CLOSE
        rest = text[json_end : border.start() if border else len(text)].strip().removesuffix("</arguments>").strip()
        if not is_closed or border is None:
            return CallBlock(end=json_end, text_end=json_end, requests=(request_with(name, arguments),))
        request = request_with(name, arguments)
        if rest or not header["arguments"]:
            found = f"unexpected text after the arguments: {rest[:80]!r}" if rest else "<arguments> is missing"
            request = failed(name=name, error=f"{found}; {self.how}")
        return CallBlock(end=border.end(), text_end=json_end, requests=(request,))

    def render(self, calls: Sequence[ToolRequest], *, tools: Sequence[ToolSpec]) -> str:
        """One block per call. Raises ValueError for a tool whose name cannot be written."""
        return "\n".join(self._render_one(call, tools=tools) for call in calls)

    def _render_one(self, call: ToolRequest, *, tools: Sequence[ToolSpec]) -> str:
        spec = next((tool for tool in tools if tool.name == call.name), None)
        server, tool = address_of(spec) if spec else (DEFAULT_SERVER, call.name)
        if not tool.strip() or set("<>") & set(server + tool):
            raise ValueError(f"tool {call.name!r}: a name in <tool_name> has no '<' or '>'")
        return (
            f"<use_mcp_tool>\n<server_name>{server}</server_name>\n<tool_name>{tool}</tool_name>\n"
            f"<arguments>\n{dump(call.arguments)}\n</arguments>\n{_CLOSE}"
        )


def address_of(spec: ToolSpec) -> tuple[str, str]:
    """Server and tool as the model addresses them."""
    return spec.server or DEFAULT_SERVER, spec.name.removeprefix(f"{spec.server}.") if spec.server else spec.name


def _tool_name(server: str, tool: str, *, tools: Sequence[ToolSpec]) -> str:
    """Our name of the addressed tool. A wrong server gives a name that no tool has, so that the model hears of it."""
    known = next((spec.name for spec in tools if address_of(spec) == (server, tool)), None)
    if known is not None:
        return known
    return f"{server}.{tool}" if tools else tool


def _unreadable(text: str, opening: re.Match[str], *, name: str, reason: str) -> CallBlock:
    border = _BORDER.search(text, opening.end())
    end = len(text) if border is None else border.end() if border[0] == _CLOSE else border.start()
    return CallBlock(end=end, text_end=opening.end(), requests=(failed(name=name, error=reason),))
