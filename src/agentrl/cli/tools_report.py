"""What `agentrl tools` prints: tools with their schemas, the trace of a call, the findings about servers."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.inspector.plain import without_controls
from agentrl.tools import ServerConfig
from agentrl.types import ToolRequest, ToolResult, ToolSpec, ToolStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTrace:
    """One call from the command line. `start_s` is the start of all servers; `notes` what the client logged."""

    request: ToolRequest
    result: ToolResult
    start_s: float
    call_s: float
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCheck:
    """What was found about one server."""

    server: ServerConfig
    start_s: float
    tools: tuple[ToolSpec, ...]
    problems: tuple[str, ...]


def print_tools(tools: Sequence[ToolSpec], *, as_json: bool) -> None:
    """All tools, as text or as OpenAI functions."""
    if as_json:
        _print(json.dumps([tool.as_openai() for tool in tools], indent=2))
        return
    for tool in tools:
        _print(f"{tool.name}  (server {tool.server}, {tool.recovery.value})")
        for line in tool.description.strip().splitlines():
            _print(f"    {line}")
        for name, schema in _properties(tool).items():
            required = name in (tool.parameters.get("required") or ())
            _print(f"    {name}: {_type(schema)}{'' if required else ', optional'}")


def print_call(trace: CallTrace, *, as_json: bool) -> None:
    """The trace of a call; the result comes last and whole."""
    result = trace.result
    if as_json:
        shown = {
            "tool": trace.request.name,
            "arguments": trace.request.arguments,
            "status": result.status,
            "error": result.error,
            "content": result.content,
            "start_s": round(trace.start_s, 4),
            "call_s": round(trace.call_s, 4),
            "notes": trace.notes,
        }
        _print(json.dumps(shown, indent=2))
        return
    _print(f"servers started in {trace.start_s:.2f} s")
    for note in trace.notes:
        _print(f"note: {note}")
    size = f"{len(result.content)} characters"
    _print(f"{trace.request.name}: {result.status.value} after {trace.call_s * 1000:.1f} ms, {size}")
    if result.status is not ToolStatus.OK and result.error and result.error not in result.content:
        _print(f"error: {result.error}")
    _print("")
    _print(result.content)


def print_checks(checks: Sequence[ServerCheck], *, as_json: bool) -> None:
    """One line a server, its problems below it."""
    if as_json:
        shown = [
            {
                "server": check.server.name,
                "start_s": round(check.start_s, 3),
                "tools": [tool.name for tool in check.tools],
                "problems": check.problems,
            }
            for check in checks
        ]
        _print(json.dumps(shown, indent=2))
        return
    for check in checks:
        verdict = "problem" if check.problems else "ok"
        names = ", ".join(tool.name for tool in check.tools) or "no tools"
        _print(f"{verdict:8} {check.server.name}  {check.start_s:.2f} s  {names}  ({check.server.description})")
        for problem in check.problems:
            _print(f"         {problem}")


def _properties(tool: ToolSpec) -> Mapping[str, Any]:
    properties = tool.parameters.get("properties")
    return properties if isinstance(properties, dict) else {}


def _type(schema: Any) -> str:
    if not isinstance(schema, dict):
        return "any"
    about = f"  {schema['description']}" if schema.get("description") else ""
    return f"{json.dumps(schema['enum']) if 'enum' in schema else schema.get('type', 'any')}{about}"


def _print(text: str) -> None:
    """To stdout; control characters of a server cannot reach the terminal."""
    sys.stdout.write(without_controls(text) + "\n")
