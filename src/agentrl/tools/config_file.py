"""Which tool servers there are, from three sources that may be used together, as validated `ServerConfig`s.

`mcp_config`, the common `mcpServers` JSON file:

    {"mcpServers": {
        "calculator": {"command": "python", "args": ["-m", "agentrl.tools.servers.calculator"]},
        "web":        {"url": "https://example.org/mcp", "auth_token": "${WEB_TOKEN}", "rate_limit_per_s": 5}}}

`tool_config_path`, MiroRL's YAML file (mirorl_file.py), and `mcp_manager_url`, one endpoint: AgentDock's gateway if it
ends in /mcpapi, else streamable HTTP, else SSE.

`${NAME}` and `${NAME:-default}` are read from the environment. The command `python` is the running interpreter. The
keys beyond the common ones are in docs/tools.md.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten
from urllib.parse import urlsplit

from agentrl.config import ToolsConfig
from agentrl.config.documents import DocumentError, read_document
from agentrl.errors import ConfigError
from agentrl.tools.mirorl_file import read_mirorl_file
from agentrl.tools.server_check import check_can_be_used
from agentrl.tools.server_config import (
    ROLLOUT_SESSIONS,
    ServerConfig,
    SessionScope,
    TransportKind,
    mask,
    names_secret,
)
from agentrl.tools.server_entry import ServerEntry, parse_entry
from agentrl.tools.server_secrets import secrets_of
from agentrl.types import Recovery

__all__ = ["ServerConfig", "TransportKind", "load_server_configs"]

BUNDLED_SERVERS = "agentrl.tools.servers."
MANAGER_SERVER = "manager"
MANAGER_URL = "mcp_manager_url"
GATEWAY_PATH = "/mcpapi"
ALL_SERVERS = "all"
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_LONGEST_COMMAND = 120  # characters of a message
_TRANSPORT_NAMES = {
    "stdio": TransportKind.STDIO,
    "http": TransportKind.HTTP,
    "streamable-http": TransportKind.HTTP,
    "streamable_http": TransportKind.HTTP,
    "streamableHttp": TransportKind.HTTP,
    "sse": TransportKind.SSE,
    "mcpapi": TransportKind.GATEWAY,
}


def load_server_configs(config: ToolsConfig, *, environment: Mapping[str, str] | None = None) -> list[ServerConfig]:
    """The servers `config` asks for, over all sources; empty if it names none. Raises ConfigError."""
    variables = os.environ if environment is None else environment
    described = _read_sources(config, variables=variables)
    chosen = described if config.mcp_server_name == ALL_SERVERS else _choose(config.mcp_server_name, described)
    return [_server_config(item, config, variables=variables) for item in chosen if not item.entry.disabled]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Described:
    """A server as one source names it."""

    name: str
    entry: ServerEntry
    source: str
    is_gateway: bool
    only_server: str | None = None

    @property
    def where(self) -> str:
        return self.source if self.source == MANAGER_URL else f"{self.source}: server {self.name!r}"


def _read_sources(config: ToolsConfig, *, variables: Mapping[str, str]) -> list[_Described]:
    sources: list[tuple[str, dict[str, ServerEntry]]] = []
    if config.mcp_config is not None:
        sources.append((str(config.mcp_config), _read_json(config.mcp_config)))
    if config.tool_config_path is not None:
        mirorl = read_mirorl_file(config.tool_config_path, variables=variables)
        sources.append((str(config.tool_config_path), mirorl))
    if config.mcp_manager_url is not None:
        entry = parse_entry({"url": config.mcp_manager_url}, where=MANAGER_URL)
        sources.append((MANAGER_URL, {MANAGER_SERVER: entry}))
    described: dict[str, _Described] = {}
    for source, entries in sources:
        for name, entry in entries.items():
            if not name or not name.isprintable():
                raise ConfigError(f"{source}: {name!r} cannot be the name of a server: models and logs must show it")
            if name in described:
                raise ConfigError(f"server {name!r} is in {described[name].source} and in {source}: rename one of them")
            is_gateway = _is_gateway_url(_with_known_variables(entry.url or "", variables=variables))
            described[name] = _Described(name=name, entry=entry, source=source, is_gateway=is_gateway)
    return list(described.values())


def _choose(wanted: str, described: Sequence[_Described]) -> list[_Described]:
    """The server of this name, else the server of this name behind a gateway."""
    named = [item for item in described if item.name == wanted]
    if named or not described:
        return named
    gateways = [replace(item, only_server=wanted) for item in described if item.is_gateway]
    if gateways:
        return gateways
    if [item.name for item in described] == [MANAGER_SERVER]:
        raise ConfigError(
            f"mcp_server_name = {wanted!r} with mcp_manager_url: an endpoint is one server, so there "
            "is nothing to choose; drop mcp_server_name or list the servers in mcp_config"
        )
    known = ", ".join(item.name for item in described)
    sources = ", ".join(dict.fromkeys(item.source for item in described))
    raise ConfigError(f"mcp_server_name = {wanted!r} is not in {sources}; it has: {known} (or use {ALL_SERVERS})")


def _read_json(path: Path) -> dict[str, ServerEntry]:
    try:
        content = read_document(path, form="json")
    except OSError as error:
        raise ConfigError(f"mcp_config = {path}: cannot be read ({error.strerror})") from error
    except DocumentError as error:
        raise ConfigError(f"mcp_config = {path}: {error}") from None
    servers = content.get("mcpServers") if isinstance(content, dict) else None
    if not isinstance(servers, dict) or not servers:
        raise ConfigError(f'mcp_config = {path}: expected {{"mcpServers": {{name: {{...}}}}}} with at least one server')
    return {name: parse_entry(entry, where=f"{path}: server {name!r}") for name, entry in servers.items()}


def _server_config(item: _Described, config: ToolsConfig, *, variables: Mapping[str, str]) -> ServerConfig:
    entry = item.entry
    kind = _transport_kind(item)

    def expand(text: str) -> str:
        return _expand(text, variables=variables, where=item.where)

    is_bundled = any(argument.startswith(BUNDLED_SERVERS) for argument in entry.args)
    default_sessions = ROLLOUT_SESSIONS if entry.scope is SessionScope.PER_ROLLOUT else config.tool_sessions_per_server
    if kind is TransportKind.GATEWAY and entry.scope is SessionScope.PER_ROLLOUT:
        raise ConfigError(f"{item.where}: scope = per_rollout: the {GATEWAY_PATH} protocol has no sessions")
    args, url = tuple(expand(argument) for argument in entry.args), expand(entry.url or "")
    server = ServerConfig(
        name=item.name,
        kind=kind,
        command=sys.executable if entry.command == "python" else expand(entry.command or ""),
        args=args,
        env={key: expand(value) for key, value in entry.env.items()},
        cwd=None if entry.cwd is None else Path(expand(str(entry.cwd))),
        url=url,
        secrets=secrets_of(args=args, url=url) | _values_of_secret_variables(entry, variables=variables),
        headers={} if kind is TransportKind.STDIO else _headers(entry, run_token=config.mcp_auth_token, expand=expand),
        recovery=entry.recovery or (Recovery.STATELESS if is_bundled else Recovery.STATEFUL),
        scope=entry.scope,
        timeout_s=entry.timeout_s or config.tool_timeout_s,
        connect_timeout_s=entry.connect_timeout_s,
        max_in_flight=entry.max_in_flight or config.tool_max_in_flight,
        sessions=entry.sessions or default_sessions,
        rate_limit_per_s=entry.rate_limit_per_s,
        max_retries=entry.max_retries,
        retry_pause_s=entry.retry_pause_s,
        breaker_failures=entry.breaker_failures,
        breaker_pause_s=entry.breaker_pause_s,
        blacklist=frozenset(entry.blacklist),
        only_server=item.only_server,
        description=_shown_url(entry.url) if entry.url else _shown_command(entry),
    )
    check_can_be_used(server, where=item.where)
    return server


def _headers(entry: ServerEntry, *, run_token: str | None, expand: Callable[[str], str]) -> dict[str, str]:
    """The entry's headers; its own token, else the run's, as bearer token unless they hold an authorization."""
    headers = {key: expand(value) for key, value in entry.headers.items()}
    token = expand(entry.auth_token) if entry.auth_token else run_token
    if token and not any(key.lower() == "authorization" for key in headers):
        headers["Authorization"] = f"Bearer {token}"
    return headers


def _values_of_secret_variables(entry: ServerEntry, *, variables: Mapping[str, str]) -> frozenset[str]:
    names = {match[1] for text in (*entry.args, entry.url or "") for match in _VARIABLE.finditer(text)}
    return frozenset(variables[name] for name in names & variables.keys() if names_secret(name))


def _shown_command(entry: ServerEntry) -> str:
    command = mask(" ".join([entry.command or "", *entry.args]), secrets=secrets_of(args=entry.args, url=""))
    return shorten(command, width=_LONGEST_COMMAND, placeholder=" ...")


def _transport_kind(item: _Described) -> TransportKind:
    entry, where = item.entry, item.where
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
    return TransportKind.GATEWAY if kind is TransportKind.AUTO and item.is_gateway else kind


def _is_gateway_url(url: str) -> bool:
    try:
        return urlsplit(url).path.rstrip("/").endswith(GATEWAY_PATH)
    except ValueError:  # no URL at all, which server_check.py says
        return False


def _with_known_variables(text: str, *, variables: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda match: variables.get(match[1], match[2] or ""), text)


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
    try:
        parts = urlsplit(url)
    except ValueError:  # no URL at all, which server_check.py says
        return ""
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
