"""The gateway as a listening process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from agentrl.protocols import Toolbox
from agentrl.tools.gateway.app import Breakers, gateway_app
from agentrl.tools.gateway.calls import GatewayLimits

_SHUTDOWN_TIMEOUT_S = 5


async def serve_gateway(
    toolbox: Toolbox,
    listener: socket.socket,
    *,
    token: str | None,
    limits: GatewayLimits,
    on_ready: Callable[[str], None],
    breakers: Breakers = dict,
) -> None:
    """Serve until cancelled; `on_ready` gets the base URL once requests are answered.

    `breakers` says how the circuit breakers of the servers stand, for /health and /metrics.
    """
    host, port = listener.getsockname()[:2]
    config = uvicorn.Config(
        gateway_app(toolbox, token=token, limits=limits, host=host, breakers=breakers),
        http=partial(_ImpatientProtocol, head_timeout_s=limits.head_timeout_s),  # type: ignore[arg-type]  # only called
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=limits.max_connections,
        timeout_graceful_shutdown=_SHUTDOWN_TIMEOUT_S,
    )
    base = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    server = _Server(config, on_started=lambda: on_ready(base))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await asyncio.shield(serving)
    finally:
        server.should_exit = True
        await asyncio.wait({serving})


class _Server(uvicorn.Server):
    """Says when it answers, and leaves signals to the process that serves."""

    def __init__(self, config: uvicorn.Config, *, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then say so."""
        await super().startup(sockets)
        if self.started:
            self._on_started()

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]  # uvicorn's is a generator
        """Nothing is captured."""
        return nullcontext()


class _ImpatientProtocol(H11Protocol):
    """Closes connections whose request head does not arrive: uvicorn itself waits for it without end."""

    def __init__(self, *, head_timeout_s: float, **uvicorn_arguments: Any) -> None:
        super().__init__(**uvicorn_arguments)
        self._head_timeout_s = head_timeout_s

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Start watching a new connection."""
        super().connection_made(transport)
        self._seen_cycle: object = None
        self._watch = self.loop.call_later(self._head_timeout_s, self._close_if_waiting)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop watching."""
        self._watch.cancel()
        super().connection_lost(exc)

    def _close_if_waiting(self) -> None:
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self.cycle is self._seen_cycle:
            self.transport.close()
            return
        self._seen_cycle = self.cycle
        self._watch = self.loop.call_later(self._head_timeout_s, self._close_if_waiting)
