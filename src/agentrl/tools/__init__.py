"""Tools of a rollout: MCP servers (`open_toolbox`) or plain Python functions (`FunctionToolbox`), both a `Toolbox`.

Names are resolved on first use, so that a bundled server (`python -m agentrl.tools.servers.calculator`), which only
needs its own module, does not pay for the client.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.tools.config_file import ServerConfig, load_server_configs
    from agentrl.tools.functions import FunctionToolbox
    from agentrl.tools.toolbox import McpToolbox, open_toolbox

__all__ = ["FunctionToolbox", "McpToolbox", "ServerConfig", "load_server_configs", "open_toolbox"]

_MODULES = {
    "FunctionToolbox": "functions",
    "McpToolbox": "toolbox",
    "ServerConfig": "config_file",
    "load_server_configs": "config_file",
    "open_toolbox": "toolbox",
}


def __getattr__(name: str) -> Any:
    """Import the module that defines a public name."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
