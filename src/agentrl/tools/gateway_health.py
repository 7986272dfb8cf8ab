"""What a gateway of ours says about the servers behind it, for `agentrl tools doctor`."""

from __future__ import annotations

from urllib.parse import urlsplit

import httpx2

from agentrl.tools.server_config import ServerConfig

_TIMEOUT_S = 5.0
_ENDPOINTS = ("/mcpapi", "/mcp")


async def gateway_problems(server: ServerConfig) -> list[str]:
    """One line per server behind `server` that fails; none if it is no gateway of ours, or all is well."""
    url = urlsplit(server.url)
    path = url.path.rstrip("/")
    prefix = next((path.removesuffix(end) for end in _ENDPOINTS if path.endswith(end)), None)
    if prefix is None:
        return []
    health_url = url._replace(path=f"{prefix}/health", query="", fragment="").geturl()
    try:
        async with httpx2.AsyncClient(timeout=_TIMEOUT_S) as http:
            health = (await http.get(health_url)).json()
    except (httpx2.HTTPError, ValueError):
        return []
    if not isinstance(health, dict):
        return []
    failures = health.get("failures_in_a_row")
    breakers = health.get("breakers")
    problems = [
        f"server {name} behind it: the last {count} calls failed for its own fault"
        for name, count in (failures if isinstance(failures, dict) else {}).items()
        if count
    ]
    return problems + [
        f"server {name} behind it: its circuit breaker is {state}"
        for name, state in (breakers if isinstance(breakers, dict) else {}).items()
    ]
