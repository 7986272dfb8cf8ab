"""Refuses, before anything starts, what neither the system nor HTTP has a way to carry.

Values are not shown: command lines, variables, headers and addresses may hold keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx2

from agentrl.errors import ConfigError
from agentrl.tools.server_config import ServerConfig, TransportKind

_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e]*")
_HOST = re.compile(r"[\w.:-]+")
_LAST_PORT = 65535


def check_can_be_used(server: ServerConfig, *, where: str) -> None:
    """Raise ConfigError naming `where` and the key."""
    problems = _stdio_problems(server) if server.kind is TransportKind.STDIO else _http_problems(server)
    for problem in problems:
        raise ConfigError(f"{where}: {problem}")


def _stdio_problems(server: ServerConfig) -> Iterator[str]:
    if not server.command.strip():
        yield "command: is empty"
    texts = {"command": server.command, "cwd": str(server.cwd or "")}
    texts |= {f"args.{position}": argument for position, argument in enumerate(server.args)}
    texts |= {f"env.{name}": value for name, value in server.env.items()}
    for key, text in texts.items():
        if not _can_be_passed(text):
            yield f"{key}: has a character that no program can be given"
    for name in server.env:
        if not name or "=" in name or not _can_be_passed(name):
            yield f"env: {name!r} is no name of an environment variable"


def _http_problems(server: ServerConfig) -> Iterator[str]:
    if not _is_address(server.url):
        yield f"url: is no address: it needs http:// or https:// and a host, and a port is at most {_LAST_PORT}"
    for name, value in server.headers.items():
        if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
            yield f"headers: {name!r}: HTTP has no such header; names and values, tokens too, are plain ASCII"


def _is_address(url: str) -> bool:
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, ValueError):
        return False
    has_host = _HOST.fullmatch(parsed.host) is not None and (parsed.port or 1) <= _LAST_PORT
    return has_host and parsed.scheme in {"http", "https"}


def _can_be_passed(text: str) -> bool:
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False
