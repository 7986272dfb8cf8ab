"""What a tool is, and one call of it from the model's request to the journal. Imported from agentrl.types."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

MAX_DEPTH = 64  # of brackets in the arguments of a call; no tool's come near


class ToolStatus(StrEnum):
    """Typed outcome of a tool call."""

    OK = "ok"
    TOOL_ERROR = "tool_error"  # the tool ran and reported an error (MCP isError)
    BAD_ARGUMENTS = "bad_arguments"  # refused before the call: the schema does not allow them
    UNKNOWN_TOOL = "unknown_tool"
    MALFORMED = "malformed"  # the model's call could not be parsed
    OVER_LIMIT = "over_limit"  # its attempt has made all the calls it may make
    TIMEOUT = "timeout"
    RATE_LIMITED = "rate_limited"  # and still so after all retries
    AUTH = "auth"  # the server does not accept who asks
    QUOTA = "quota"  # what was paid for is used up
    CRASHED = "crashed"  # the server died during the call, is down, or answered what is no tool result
    CANCELLED = "cancelled"
    NOT_RECORDED = "not_recorded"  # strict replay: the journal does not have the call

    @property
    def is_infrastructure(self) -> bool:
        """Whether the tool server, not the model, is to blame."""
        return self is ToolStatus.TIMEOUT or self.ends_record

    @property
    def ends_record(self) -> bool:
        """Whether a Record cannot go on fairly: its tools are away, through no fault of the model."""
        return self in {
            ToolStatus.RATE_LIMITED, ToolStatus.AUTH, ToolStatus.QUOTA, ToolStatus.CRASHED, ToolStatus.CANCELLED,
            ToolStatus.NOT_RECORDED,
        }  # fmt: skip

    @property
    def was_sent(self) -> bool:
        """Whether the call reached a tool, or may have."""
        return self not in {
            ToolStatus.BAD_ARGUMENTS, ToolStatus.UNKNOWN_TOOL, ToolStatus.MALFORMED, ToolStatus.OVER_LIMIT
        }  # fmt: skip


class ResultOrigin(StrEnum):
    """Where the result of a tool call came from: the tool, or the tool journal in its place."""

    LIVE = "live"
    CACHE = "cache"  # an earlier equal call
    REPLAY = "replay"
    FAULT = "fault"  # injected


class Recovery(StrEnum):
    """What a tool's calls leave behind, and so what becomes of a Record whose sampler died after using it."""

    STATELESS = "stateless"  # nothing: a call may be repeated, and the Record goes on elsewhere
    JOURNALLED = (
        "journalled"  # an effect that must not happen twice: results are kept, and the Record goes on elsewhere
    )
    STATEFUL = "stateful"  # something that dies with the sampler: the Record starts over

    @property
    def is_resumable(self) -> bool:
        """Whether a Record may be continued elsewhere after calling the tool."""
        return self is not Recovery.STATEFUL


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """A tool as the model sees it."""

    name: str  # unique; "server.tool" where two servers offer the same name
    description: str
    parameters: Mapping[str, Any]  # JSON schema of the arguments object
    server: str = ""
    recovery: Recovery = Recovery.STATEFUL
    timeout_s: float | None = None  # of one call; None: as the run says

    @property
    def own_name(self) -> str:
        """The tool as its server names it."""
        return self.name.removeprefix(f"{self.server}.")

    @property
    def setting_keys(self) -> tuple[str, ...]:
        """Keys of a table of settings by tool that mean this one, the closest first."""
        return (f"{self.server}.{self.own_name}", self.own_name, f"{self.server}.*", "*")

    def as_openai(self) -> dict[str, Any]:
        """The function-calling form chat templates expect."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRequest:
    """One call the model asked for. `error` is set when its text could not be parsed into a call."""

    call_id: str
    name: str
    arguments: Mapping[str, Any]
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What the model gets back, and how it went.

    `items` (MCP content items as JSON, where the result is more than one text) and `structured` (its structured
    content) are what `content` was made of: for whoever passes a result on. They are not stored.
    """

    status: ToolStatus
    content: str
    error: str | None = None
    items: tuple[Mapping[str, Any], ...] = ()
    structured: Any = None
    origin: ResultOrigin = ResultOrigin.LIVE
    cost_nano_usd: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call as the tool journal knows it. The same call of a later attempt or owner of the Record is equal."""

    record_id: str
    turn: int
    index: int  # among the turn's calls, from 1
    server: str
    tool: str  # as the server names it
    arguments: Mapping[str, Any]

    @property
    def content_hash(self) -> str:
        """SHA-256 of server, tool and arguments as canonical JSON: equal for equal calls of any Record."""
        content = [self.server, self.tool, self.arguments]
        return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode("ascii")).hexdigest()

    @property
    def key(self) -> str:
        """The idempotency key: a call of this key is executed once, as far as its result reached the journal."""
        return f"{self.record_id}/{self.turn:03d}/{self.index}/{self.content_hash}"


def why_unusable(value: Any) -> str | None:
    """Why a decoded JSON value cannot be checked, stored and sent, as the end of a sentence; None if it can."""
    if _is_too_deep(value):
        return f"has more than {MAX_DEPTH} brackets inside each other"
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "contains half of a surrogate pair (\\ud800-\\udfff)"
    except ValueError:
        return "contains a number of thousands of digits"
    return None


def _is_too_deep(value: Any) -> bool:
    """Whether a value is nested so that what goes through it by recursion may fail."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return False
    return True


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()
