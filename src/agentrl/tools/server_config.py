"""`ServerConfig`: one tool server, ready to be started, wherever its description was read from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from agentrl.types import Recovery

MAX_RETRIES = 2
RETRY_PAUSE_S = 0.5
BREAKER_FAILURES = 5
BREAKER_PAUSE_S = 15.0
MAX_SESSIONS = 4096
MASK = "***"
_NAMES_SECRET = re.compile(r"key|token|secret|password|credential|auth", re.IGNORECASE)
_SHORTEST_SECRET = 6  # what is shorter would blot out words
ROLLOUT_SESSIONS = 96  # as many Records as one sampler has in flight by default


class TransportKind(StrEnum):
    """How a server is spoken to."""

    STDIO = "stdio"
    HTTP = "http"  # streamable HTTP
    SSE = "sse"  # the legacy transport
    AUTO = "auto"  # streamable HTTP, else SSE
    GATEWAY = "mcpapi"  # AgentDock's HTTP API: many servers behind one URL, not MCP


class SessionScope(StrEnum):
    """Who shares a session with a server."""

    SHARED = "shared"  # all Records of the process
    PER_ROLLOUT = "per_rollout"  # a session (stdio: a process) for each Record that calls it, ended with the Record


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """One tool server: variables expanded, defaults filled in."""

    name: str
    kind: TransportKind
    command: str = ""
    args: tuple[str, ...] = field(default=(), repr=False)
    env: Mapping[str, str] = field(default_factory=dict, repr=False)  # added to HOME, PATH and the like
    cwd: Path | None = None
    url: str = field(default="", repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    secrets: frozenset[str] = field(default=frozenset(), repr=False)  # the keys among args and in url
    recovery: Recovery
    scope: SessionScope = SessionScope.SHARED
    timeout_s: float  # of one call, its retries included
    connect_timeout_s: float | None = None  # None: as the toolbox says
    max_in_flight: int  # per session
    sessions: int  # per_rollout: at most this many at a time
    rate_limit_per_s: float | None = None
    max_retries: int = MAX_RETRIES
    retry_pause_s: float = RETRY_PAUSE_S
    breaker_failures: int = BREAKER_FAILURES
    breaker_pause_s: float = BREAKER_PAUSE_S
    blacklist: frozenset[str] = frozenset()  # tools not shown to the model, by the server's own names
    only_server: str | None = None  # of a gateway: the one server whose tools are used
    description: str  # for messages: the command or URL as written, without secrets

    def without_secrets(self, text: str) -> str:
        """What the server says, without the keys it was given: servers like to quote them."""
        named = [value for name, value in self.env.items() if names_secret(name)]
        sent = [value.removeprefix("Bearer ") for value in self.headers.values()]
        return mask(text, secrets={*named, *sent, *self.secrets})

    def json_without_secrets(self, value: Any) -> Any:
        """The same for every string of a JSON value, keys of objects included."""
        if isinstance(value, str):
            return self.without_secrets(value)
        if isinstance(value, Mapping):
            return {self.without_secrets(key): self.json_without_secrets(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(self.json_without_secrets, value))
        return value


def names_secret(name: str) -> bool:
    """Whether a variable of that name holds a key."""
    return _NAMES_SECRET.search(name) is not None


def mask(text: str, *, secrets: Iterable[str]) -> str:
    """`text` without those secrets that are long enough to be some."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _SHORTEST_SECRET:
            text = text.replace(secret, MASK)
    return text
