"""Counts what goes to the database server over real connections, by the driver's own monitoring."""

from __future__ import annotations

from pymongo import monitoring


class CommandCounter(monitoring.CommandListener):
    """Names of the commands sent to one database since `reset`."""

    def __init__(self, database: str) -> None:
        self._database = database
        self.names: list[str] = []

    def reset(self) -> None:
        self.names = []

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        if event.database_name == self._database:
            self.names.append(event.command_name)

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None:
        """Not counted."""

    def failed(self, event: monitoring.CommandFailedEvent) -> None:
        """Not counted."""
