"""An embedded database server that tests kill and start again on its data."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.store.embedded import EmbeddedServer, start_embedded


@dataclass
class CrashingServer:
    """An embedded server that can be killed and started again on its data."""

    directory: Path
    port: int
    server: EmbeddedServer = field(init=False)

    def start(self) -> None:
        """Start it, with what it had when it was killed."""
        log_path = self.directory / "server.log"
        self.server = start_embedded(self.directory / "data", port=self.port, log_path=log_path)

    async def crash_and_restart(self) -> None:
        """As short an outage as there is."""
        self.server.kill()
        await asyncio.to_thread(self.start)

    async def stay_away(self, duration_s: float) -> None:
        """Kill it, and start it again when that time is over."""
        self.server.kill()
        await asyncio.sleep(duration_s)
        await asyncio.to_thread(self.start)
