"""Calls that come in over the gateway: bounded in number and time, ended with their client, counted."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from agentrl.protocols import Toolbox
from agentrl.tools.gateway.metrics import GatewayMetrics
from agentrl.tools.requests import failure
from agentrl.types import ToolRequest, ToolResult, ToolSpec, ToolStatus

UNKNOWN = "unknown"  # label of calls that name no tool: a request never makes a label


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayLimits:
    """What the gateway takes on."""

    max_in_flight: int = 64
    max_waiting: int = 256
    call_timeout_s: float = 140.0  # clients of /mcpapi give up after 150 s: the answer must come first
    max_body_bytes: int = 4 * 1024 * 1024
    max_connections: int = 512
    session_idle_s: float = 120.0  # an MCP session whose client has no connection open ends after this
    head_timeout_s: float = 20.0  # for a client to send the head of a request; seen at the latest after twice that
    body_timeout_s: float = 30.0  # for a client to send the rest
    send_timeout_s: float = 30.0  # for a client to take a piece of its reply


class GatewayBusyError(Exception):
    """Too many calls wait already; nothing was sent to a tool."""


class GatewayCalls:
    """The tools of one Toolbox, called by many clients."""

    def __init__(self, toolbox: Toolbox, *, limits: GatewayLimits, metrics: GatewayMetrics) -> None:
        self._toolbox = toolbox
        self._limits = limits
        self._metrics = metrics
        self._slots = asyncio.Semaphore(limits.max_in_flight)
        self._specs = {spec.name: spec for spec in toolbox.list_tools()}
        # Clients of /mcpapi call server.tool also where the bare name is unique.
        self._names = {qualified_name(spec): spec.name for spec in self._specs.values()}
        self.in_flight = 0
        self.waiting = 0

    @property
    def specs(self) -> Sequence[ToolSpec]:
        """All tools, in the order of the configuration."""
        return tuple(self._specs.values())

    @property
    def servers(self) -> list[str]:
        """The servers that have tools, in the same order."""
        return list(dict.fromkeys(spec.server for spec in self._specs.values()))

    def find(self, name: str) -> ToolSpec | None:
        """The tool of this name, bare or as server.tool."""
        return self._specs.get(name) or self._specs.get(self._names.get(name, ""))

    def for_session(self) -> AbstractAsyncContextManager[Toolbox]:
        """What `call` needs for the calls of one client's session, with the session's own `per_rollout` servers."""
        return self._toolbox.for_record()

    async def call(self, name: str, arguments: Mapping[str, Any], *, toolbox: Toolbox | None = None) -> ToolResult:
        """One call; the outcome is typed. Cancelling it cancels the tool's call. Raises GatewayBusyError.

        Without the `toolbox` of a session it has no state with `per_rollout` servers.
        """
        if self.waiting >= self._limits.max_waiting:
            self._metrics.count_refused("busy")
            raise GatewayBusyError("the gateway is busy: try again later")
        spec = self.find(name)
        request = ToolRequest(call_id=uuid.uuid4().hex, name=name if spec is None else spec.name, arguments=arguments)
        began = time.monotonic()
        result = failure(ToolStatus.CANCELLED, "the client went away")
        try:
            result = await self._call_in_slot(request, toolbox=toolbox or self._toolbox, began=began)
        finally:
            self._metrics.count_call(
                server=UNKNOWN if spec is None else spec.server,
                tool=UNKNOWN if spec is None else spec.name,
                status=result.status,
                seconds=time.monotonic() - began,
                is_server_failure=result.status.is_infrastructure and result.status is not ToolStatus.CANCELLED,
            )
        return result

    async def _call_in_slot(self, request: ToolRequest, *, toolbox: Toolbox, began: float) -> ToolResult:
        self.waiting += 1
        try:
            async with asyncio.timeout(self._limits.call_timeout_s):
                await self._slots.acquire()
        except TimeoutError:
            return failure(ToolStatus.TIMEOUT, "the gateway is busy: no slot became free in time")
        finally:
            self.waiting -= 1
        self.in_flight += 1
        try:
            left_s = self._limits.call_timeout_s - (time.monotonic() - began)
            return await toolbox.call(request, deadline_s=max(0.001, left_s))
        finally:
            self.in_flight -= 1
            self._slots.release()


def qualified_name(spec: ToolSpec) -> str:
    """`server.tool`, whether or not the model sees the server's name."""
    return spec.name if spec.name.startswith(f"{spec.server}.") else f"{spec.server}.{spec.name}"
