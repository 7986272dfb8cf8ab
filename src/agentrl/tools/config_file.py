"""Which tool servers there are: the common `mcpServers` JSON file, or one URL, as validated `ServerConfig`s.

    {"mcpServers": {
        "calculator": {"command": "python", "args": ["-m", "agentrl.tools.servers.calculator"]},
        "web":        {"url": "https://example.org/mcp", "headers": {"Authorization": "Bearer ${WEB_TOKEN}"}}}}

`${NAME}` and `${NAME:-default}` are read from the environment. The command `python` is the running interpreter.
Beyond the common keys an entry may set `recovery` (docs/recovery.md), `timeout_s`, `max_in_flight` and `sessions`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from textwrap import shorten
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentrl.config import ToolsConfig
from agentrl.errors import ConfigError
from agentrl.types import Recovery

BUNDLED_SERVERS = "agentrl.tools.servers."
MANAGER_SERVER = "manager"
GATEWAY_PATH = "/mcpapi"
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_LONGEST_COMMAND = 120  # characters of a message
# Written by editors that share this file format; they mean nothing to a rollout.
_EDITOR_KEYS = frozenset({"alwaysAllow", "autoApprove", "description", "gallery"})


class TransportKind(StrEnum):
    """How a server is spoken to."""

    STDIO = "stdio"
    HTTP = "http"  # streamable HTTP
    SSE = "sse"  # the legacy transport
    AUTO = "auto"  # streamable HTTP, else SSE


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """One tool server, ready to be started: variables expanded, defaults filled in."""

    name: str
    kind: TransportKind
    command: str = ""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)  # added to HOME, PATH and the like
    cwd: Path | None = None
    url: str = field(default="", repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    recovery: Recovery
    timeout_s: float
    max_in_flight: int
    sessions: int
    description: str  # for messages: the command or URL as written, without secrets


class _ServerEntry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    command: str | None = Field(None, min_length=1)
    args: list[str] = []
    env: dict[str, str] = {}
    cwd: Path | None = None
    url: str | None = Field(None, pattern=r"^(https?://|\$\{)")
    headers: dict[str, str] = {}
    type: str | None = None
    transport: str | None = None
    disabled: bool = False
    recovery: Recovery | None = None
    timeout_s: float | None = Field(None, gt=0)
    max_in_flight: int | None = Field(None, ge=1)
    sessions: int | None = Field(None, ge=1)


_TRANSPORT_NAMES = {
    "stdio": TransportKind.STDIO,
    "http": TransportKind.HTTP,
    "streamable-http": TransportKind.HTTP,
    "streamable_http": TransportKind.HTTP,
    "streamableHttp": TransportKind.HTTP,
    "sse": TransportKind.SSE,
}


def load_server_configs(config: ToolsConfig, *, environment: Mapping[str, str] | None = None) -> list[ServerConfig]:
    """The servers `config` asks for; empty if it names neither a file nor a URL. Raises ConfigError."""
    if config.mcp_config is not None and config.mcp_manager_url is not None:
        raise ConfigError("mcp_config and mcp_manager_url are both set: keep one of them")
    if config.mcp_manager_url is not None:
        return [_manager_config(config.mcp_manager_url, config)]
    if config.mcp_config is None:
        return []
    variables = os.environ if environment is None else environment
    entries = _read_entries(config.mcp_config)
    _check_server_filter(config.mcp_server_name, known=list(entries), path=config.mcp_config)
    return [
        _server_config(name, entry, config, variables=variables, where=f"{config.mcp_config}: server {name!r}")
        for name, entry in entries.items()
        if config.mcp_server_name in ("all", name) and not entry.disabled
    ]


def _manager_config(url: str, config: ToolsConfig) -> ServerConfig:
    if urlsplit(url).path.rstrip("/").endswith(GATEWAY_PATH):
        raise ConfigError(
            f"mcp_manager_url = {_shown_url(url)}: the {GATEWAY_PATH} gateway protocol is not available yet; "
            "give the URL of a streamable-HTTP or SSE MCP endpoint, or list the servers in mcp_config"
        )
    if config.mcp_server_name != "all":
        raise ConfigError(
            f"mcp_server_name = {config.mcp_server_name!r} with mcp_manager_url: an endpoint is one server, so there "
            "is nothing to choose; drop mcp_server_name or list the servers in mcp_config"
        )
    entry = _parse_entry({"url": url}, where="mcp_manager_url")
    return _server_config(MANAGER_SERVER, entry, config, variables=os.environ, where="mcp_manager_url")


def _read_entries(path: Path) -> dict[str, _ServerEntry]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"mcp_config = {path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(f"mcp_config = {path}: not JSON ({error})") from error
    servers = content.get("mcpServers") if isinstance(content, dict) else None
    if not isinstance(servers, dict) or not servers:
        raise ConfigError(f'mcp_config = {path}: expected {{"mcpServers": {{name: {{...}}}}}} with at least one server')
    return {name: _parse_entry(entry, where=f"{path}: server {name!r}") for name, entry in servers.items()}


def _parse_entry(entry: Any, *, where: str) -> _ServerEntry:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: expected an object, got {type(entry).__name__}")
    known = {key: value for key, value in entry.items() if key not in _EDITOR_KEYS}
    try:
        return _ServerEntry.model_validate(known)
    except ValidationError as error:
        problems = "; ".join(_describe_problem(problem) for problem in error.errors(include_url=False))
        raise ConfigError(f"{where}: {problems}") from error


def _describe_problem(problem: Mapping[str, Any]) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] != "extra_forbidden":
        return f"{key}: {problem['msg']}"
    if key == "stateless":  # how it was declared before there was a journal
        return 'unknown key \'stateless\': write "recovery": "stateless", or leave it out for "stateful"'
    nearest = get_close_matches(key, list(_ServerEntry.model_fields), n=1)
    return f"unknown key {key!r}" + (f", did you mean {nearest[0]!r}?" if nearest else "")


def _check_server_filter(wanted: str, *, known: list[str], path: Path) -> None:
    if wanted != "all" and wanted not in known:
        raise ConfigError(f"mcp_server_name = {wanted!r} is not in {path}; it has: {', '.join(known)} (or use all)")


def _server_config(
    name: str, entry: _ServerEntry, config: ToolsConfig, *, variables: Mapping[str, str], where: str
) -> ServerConfig:
    kind = _transport_kind(entry, where=where)

    def expand(text: str) -> str:
        return _expand(text, variables=variables, where=where)

    headers = {key: expand(value) for key, value in entry.headers.items()}
    if config.mcp_auth_token and not any(key.lower() == "authorization" for key in headers):
        headers["Authorization"] = f"Bearer {config.mcp_auth_token}"
    bundled = any(argument.startswith(BUNDLED_SERVERS) for argument in entry.args)
    return ServerConfig(
        name=name,
        kind=kind,
        command=sys.executable if entry.command == "python" else expand(entry.command or ""),
        args=tuple(expand(argument) for argument in entry.args),
        env={key: expand(value) for key, value in entry.env.items()},
        cwd=None if entry.cwd is None else Path(expand(str(entry.cwd))),
        url=expand(entry.url or ""),
        headers=headers if kind is not TransportKind.STDIO else {},
        recovery=entry.recovery or (Recovery.STATELESS if bundled else Recovery.STATEFUL),
        timeout_s=entry.timeout_s or config.tool_timeout_s,
        max_in_flight=entry.max_in_flight or config.tool_max_in_flight,
        sessions=entry.sessions or config.tool_sessions_per_server,
        description=_shown_url(entry.url) if entry.url else _shown_command(entry),
    )


def _shown_command(entry: _ServerEntry) -> str:
    return shorten(" ".join([entry.command or "", *entry.args]), width=_LONGEST_COMMAND, placeholder=" ...")


def _transport_kind(entry: _ServerEntry, *, where: str) -> TransportKind:
    if (entry.command is None) == (entry.url is None):
        raise ConfigError(f"{where}: give either `command` (stdio) or `url` (HTTP)")
    named = entry.type or entry.transport
    if named is not None and named not in _TRANSPORT_NAMES:
        raise ConfigError(f"{where}: type = {named!r} is none of {', '.join(_TRANSPORT_NAMES)}")
    kind = TransportKind.AUTO if named is None else _TRANSPORT_NAMES[named]
    if entry.command is not None:
        if kind not in (TransportKind.AUTO, TransportKind.STDIO):
            raise ConfigError(f"{where}: type = {named!r} needs a `url`, but a `command` is given")
        return TransportKind.STDIO
    if kind is TransportKind.STDIO:
        raise ConfigError(f"{where}: type = {named!r} needs a `command`, but a `url` is given")
    return kind


def _expand(text: str, *, variables: Mapping[str, str], where: str) -> str:
    def value_of(match: re.Match[str]) -> str:
        name, default = match.groups()
        value = variables.get(name, default)
        if value is None:
            raise ConfigError(f"{where}: ${{{name}}} is not in the environment; set it or write ${{{name}:-default}}")
        return value

    return _VARIABLE.sub(value_of, text)


def _shown_url(url: str) -> str:
    """`url` without user, password and query, which may hold secrets."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
