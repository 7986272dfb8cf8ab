"""MiroRL's YAML tool file, as it is, read as entries like those of the `mcpServers` file.

tools:
  - class_name: "mirorl.tools.mcp_tool.MCPTool"     # not imported: every entry is an MCP server over stdio
    config:
      command: "python"
      args: ["tools/search_server.py"]
      env: ["SERPER_API_KEY", "HTTPS_PROXY"]        # names; those that are not set are left out
      server_name: "search"                         # else named after the script or module
      max_retries: 5
      delay_between_retries: 1
      connection_timeout: 5
      execution_timeout: 60
      blacklist: ["scrape"]
    tool_schema: {type: "mcp", function: {}}        # may be missing
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from agentrl.config.documents import DocumentError, read_document
from agentrl.errors import ConfigError
from agentrl.tools.server_entry import ServerEntry, validate

_MCP_TYPE = "mcp"


class _ServerSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    command: str = Field(min_length=1)
    args: list[str] = []
    env: list[str] | None = None
    server_name: str | None = Field(None, min_length=1)
    max_retries: int | None = Field(None, ge=0)
    delay_between_retries: float | None = Field(None, ge=0)
    connection_timeout: float | None = Field(None, gt=0)
    execution_timeout: float | None = Field(None, gt=0)
    blacklist: list[str] | None = None


class _ToolItem(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    class_name: str = ""
    config: dict[str, Any]
    tool_schema: dict[str, Any] | None = None


def read_mirorl_file(path: Path, *, variables: Mapping[str, str]) -> dict[str, ServerEntry]:
    """Server entries by name, in the order of the file. Raises ConfigError."""
    try:
        content = read_document(path)
    except OSError as error:
        raise ConfigError(f"tool_config_path = {path}: cannot be read ({error.strerror})") from error
    except DocumentError as error:
        raise ConfigError(f"tool_config_path = {path}: {error}") from None
    items = content.get("tools") if isinstance(content, dict) else None
    if not isinstance(items, list) or not items:
        raise ConfigError(f"tool_config_path = {path}: expected a list `tools` with at least one entry")
    entries: dict[str, ServerEntry] = {}
    for number, item in enumerate(items, start=1):
        where = f"{path}: tool {number}"
        settings = _read_settings(item, where=where)
        name = settings.server_name or _unused(_name_of(settings), entries)
        if name in entries:
            raise ConfigError(f"{where}: server_name = {name!r} is already taken")
        entries[name] = _to_entry(settings, variables=variables)
    return entries


def _read_settings(item: Any, *, where: str) -> _ServerSettings:
    if not isinstance(item, dict):
        raise ConfigError(f"{where}: expected a mapping with `config`, got {type(item).__name__}")
    tool = validate(_ToolItem, item, where=where)
    kind = (tool.tool_schema or {}).get("type", _MCP_TYPE)
    if kind != _MCP_TYPE:
        raise ConfigError(
            f"{where}: tool_schema.type = {_shown(kind)}: {tool.class_name or 'its class'} is a tool of another "
            "trainer; only MCP servers are read from this file, so put the tool behind one"
        )
    return validate(_ServerSettings, tool.config, where=f"{where}: config")


def _shown(kind: Any) -> str:
    return repr(kind) if isinstance(kind, str) else f"a {type(kind).__name__}"


def _name_of(settings: _ServerSettings) -> str:
    """The script without its suffix, else the module after -m, else the first plain argument, else the command."""
    for argument in settings.args:
        if argument.endswith((".py", ".js")):
            return PurePath(argument).stem
    plain = [argument for argument in settings.args if not argument.startswith("-")]
    return PurePath(plain[0]).name if plain else PurePath(settings.command).name


def _unused(name: str, taken: Mapping[str, ServerEntry]) -> str:
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name}-{number}"
    return candidate


def _to_entry(settings: _ServerSettings, *, variables: Mapping[str, str]) -> ServerEntry:
    given = {
        "max_retries": settings.max_retries,
        "retry_pause_s": settings.delay_between_retries,
        "connect_timeout_s": settings.connection_timeout,
        "timeout_s": settings.execution_timeout,
        "blacklist": settings.blacklist,
    }
    return ServerEntry.model_validate(
        {
            "command": settings.command,
            "args": settings.args,
            "env": {name: f"${{{name}}}" for name in settings.env or () if name in variables},
            **{key: value for key, value in given.items() if value is not None},
        }
    )
