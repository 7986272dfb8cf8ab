"""A tool journal as a file: what every tool call of a run was answered, and which tools there were.

    {"agentrl_tool_journal": 1, "run": "demo"}
    {"tool": {"name": "search", "description": ..., "parameters": ..., "server": "web", "recovery": "stateless"}}
    {"call": {"record_id", "turn", "index", "server", "tool", "arguments", "status", "content", "error", "at"}}

Written by `agentrl journal`, read by `--tool_journal replay` and `cache`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from agentrl.errors import ArchiveError, UnavailableError
from agentrl.protocols import Toolbox
from agentrl.types import (
    DispatchedSamplingTask,
    DispatchKind,
    Recovery,
    ToolCall,
    ToolRequest,
    ToolResult,
    ToolSpec,
    ToolStatus,
)

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """One call and what it returned, when."""

    call: ToolCall
    result: ToolResult
    at: datetime


class RecordedCalls:
    """The calls of a journal file in memory, found by their key or by what they asked."""

    def __init__(self, specs: Sequence[ToolSpec], calls: Iterable[RecordedCall]) -> None:
        self.specs = tuple(specs)
        self._by_key: dict[str, RecordedCall] = {}
        self._newest: dict[str, RecordedCall] = {}
        for recorded in calls:
            self._by_key[recorded.call.key] = recorded
            known = self._newest.get(recorded.call.content_hash)
            if recorded.result.status is ToolStatus.OK and (known is None or known.at < recorded.at):
                self._newest[recorded.call.content_hash] = recorded

    def __len__(self) -> int:
        return len(self._by_key)

    def find(self, call: ToolCall) -> ToolResult | None:
        """What this very call of this Record returned, else the newest answer to an equal one."""
        recorded = self._by_key.get(call.key) or self._newest.get(call.content_hash)
        return None if recorded is None else recorded.result

    def find_equal(self, call: ToolCall, *, since: datetime) -> ToolResult | None:
        """The newest answer to an equal call that is not older."""
        recorded = self._newest.get(call.content_hash)
        return None if recorded is None or recorded.at < since else recorded.result


class RecordedToolbox:
    """agentrl.protocols.Toolbox of tools that are not there: their specifications alone, for strict replay."""

    def __init__(self, specs: Sequence[ToolSpec]) -> None:
        self._specs = tuple(specs)

    def list_tools(self) -> Sequence[ToolSpec]:
        """The tools of the recorded run, in its order."""
        return self._specs

    async def call(self, request: ToolRequest, *, deadline_s: float) -> ToolResult:
        """No server runs, so nothing can be called."""
        return not_recorded(request.name)

    def for_record(self) -> AbstractAsyncContextManager[Toolbox]:
        """The same: nothing here has a session."""
        return nullcontext(self)

    async def close(self) -> None:
        """Nothing to end."""


def not_recorded(name: str) -> ToolResult:
    """The typed outcome of a call that a strict replay does not know."""
    message = f"{name}: this call is not in the tool journal that is replayed"
    return ToolResult(status=ToolStatus.NOT_RECORDED, content=message, error=message)


# --- the file -----------------------------------------------------------------------------------------------------


def spec_to_json(spec: ToolSpec) -> dict[str, Any]:
    """A tool as the Run document and the file keep it."""
    return {
        "name": spec.name,
        "description": spec.description,
        "parameters": dict(spec.parameters),
        "server": spec.server,
        "recovery": spec.recovery.value,
    }


def spec_from_json(stored: Mapping[str, Any]) -> ToolSpec:
    """Back from there."""
    return ToolSpec(**{**stored, "recovery": Recovery(stored["recovery"])})


def recorded_call(dispatch: DispatchedSamplingTask, *, specs: Mapping[str, ToolSpec]) -> RecordedCall | None:
    """A stored tool call for the journal; None if it never reached a tool, or one that is not known any more."""
    if dispatch.kind is not DispatchKind.TOOL or dispatch.target not in specs:
        return None
    status, spec = ToolStatus(dispatch.status), specs[dispatch.target]
    if not status.was_sent or status is ToolStatus.NOT_RECORDED:
        return None
    call = ToolCall(
        record_id=dispatch.record_id,
        turn=dispatch.turn,
        index=dispatch.index,
        server=spec.server,
        tool=spec.own_name,
        arguments=dispatch.request["arguments"],
    )
    result = ToolResult(status=status, content=str(dispatch.response["content"]), error=dispatch.error)
    return RecordedCall(call=call, result=result, at=dispatch.finished_at)


def write_header(file: IO[str], *, run_name: str, specs: Sequence[ToolSpec]) -> None:
    """The first lines of a journal file."""
    _write_line(file, {"agentrl_tool_journal": FORMAT, "run": run_name})
    for spec in specs:
        _write_line(file, {"tool": spec_to_json(spec)})


def write_call(file: IO[str], recorded: RecordedCall) -> None:
    """One call."""
    call, result = recorded.call, recorded.result
    fields = {
        "record_id": call.record_id,
        "turn": call.turn,
        "index": call.index,
        "server": call.server,
        "tool": call.tool,
        "arguments": call.arguments,
        "status": result.status.value,
        "content": result.content,
        "error": result.error,
        "at": recorded.at.isoformat(),
    }
    _write_line(file, {"call": fields})


def load_recorded_calls(path: Path) -> RecordedCalls:
    """Read a journal file. Raises UnavailableError if it is not there, ArchiveError naming the first bad line."""
    specs: list[ToolSpec] = []
    calls: list[RecordedCall] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, entry in _entries(file, path=path):
                try:
                    _read_entry(entry, is_first=number == 1, specs=specs, calls=calls)
                except (KeyError, TypeError, ValueError) as error:
                    raise ArchiveError(f"{path}, line {number}: no entry of a tool journal ({error!r})") from error
    except UnicodeDecodeError as error:
        raise ArchiveError(f"{path}: no text in UTF-8, so no tool journal") from error
    except OSError as error:
        raise UnavailableError(
            f"tool_journal_file = {path}: {error.strerror}; write one with `agentrl journal RUN_NAME FILE`"
        ) from error
    if not specs and not calls:
        raise ArchiveError(f"{path}: an empty tool journal; write one with `agentrl journal RUN_NAME FILE`")
    return RecordedCalls(specs, calls)


def _entries(file: IO[str], *, path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(file, start=1):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ArchiveError(f"{path}, line {number}: no JSON ({error}); is the file cut off?") from error
        yield number, entry


def _read_entry(entry: Mapping[str, Any], *, is_first: bool, specs: list[ToolSpec], calls: list[RecordedCall]) -> None:
    if is_first:
        if entry["agentrl_tool_journal"] != FORMAT:
            raise ValueError(f"format {entry['agentrl_tool_journal']}, this release reads {FORMAT}")
    elif "tool" in entry:
        specs.append(spec_from_json(entry["tool"]))
    else:
        fields = dict(entry["call"])
        result = ToolResult(
            status=ToolStatus(fields.pop("status")), content=fields.pop("content"), error=fields.pop("error")
        )
        at = datetime.fromisoformat(fields.pop("at"))
        if at.tzinfo is None:
            raise ValueError(f"at = {at.isoformat()} has no time zone")
        calls.append(RecordedCall(call=ToolCall(**fields), result=result, at=at))


def _write_line(file: IO[str], entry: Mapping[str, Any]) -> None:
    file.write(json.dumps(entry) + "\n")
