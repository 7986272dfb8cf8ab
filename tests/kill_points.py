"""Named instants inside a process at which somebody is killed: the victim's own side of the kill campaign.

    FOLDER/NAME.armed    {"point": "after turn header", "delay_s": 0.0, "victims": [pid, ...]}     from the campaign
    FOLDER/NAME.fired    time.monotonic() of the kill: that clock is the same in all processes of a machine

Writes to the database are instants by themselves: a listener of the driver sees each command just before it is sent
and just after its reply, so the product's code is left as it is. The last of the victims may be the process itself.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pymongo import monitoring


class KillPoints(monitoring.CommandListener):
    """Looks at every instant whether this process was told to kill now."""

    def __init__(self, folder: Path, *, name: str) -> None:
        self._armed = folder / f"{name}.armed"
        self._fired = folder / f"{name}.fired"
        self._writes: dict[int, tuple[str, ...]] = {}

    def reach(self, point: str) -> None:
        """This instant has come."""
        try:
            order = json.loads(self._armed.read_text())
        except FileNotFoundError:
            return
        if order["point"] != point:
            return
        self._armed.unlink()
        if order["delay_s"]:
            threading.Timer(order["delay_s"], self._fire, args=[order["victims"]]).start()
        else:
            self._fire(order["victims"])

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        """A command is about to be sent."""
        writes = tuple(writes_of(event.command_name, event.command))
        if writes:
            self._writes[event.request_id] = writes
        for write in writes:
            self.reach(f"before {write}")

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None:
        """Its reply is there; the code that waits for it does not know yet."""
        for write in self._writes.pop(event.request_id, ()):
            self.reach(f"after {write}")

    def failed(self, event: monitoring.CommandFailedEvent) -> None:
        """There will be no reply."""
        self._writes.pop(event.request_id, None)

    def _fire(self, victims: list[int]) -> None:
        unfinished = self._fired.with_suffix(".tmp")
        unfinished.write_text(repr(time.monotonic()))
        unfinished.rename(self._fired)
        for pid in victims:
            os.kill(pid, signal.SIGKILL)


def writes_of(command_name: str, command: Mapping[str, Any]) -> Iterator[str]:
    """What a command writes, in the words of the design."""
    collection = command.get(command_name)
    if command_name == "insert":
        name = {
            "Record": "records",
            "DispatchedSamplingTask": "turn documents",
            "DBRecordData": "training rows",
            "TrainStep": "plan",
        }.get(str(collection))
        if name is not None:
            yield name
    if command_name == "update":
        changes = [update["u"] for update in command.get("updates", ())]
        yield from {name for change in changes if (name := _name_of_update(str(collection), change)) is not None}


def _name_of_update(collection: str, change: Mapping[str, Any]) -> str | None:
    fields = change.get("$set", {})
    match collection:
        case "Record" if "$push" in change:
            return "turn header"
        case "Record" if "status" in fields:
            return "record result"
        case "Task" if "settlement" in fields:
            return "settlement"
        case "Task" if "fence" in change.get("$inc", {}):
            return "claim"
        case "Task" if "consumed_step" in fields:
            return "consumption"
        case "TrainStep" if "committed_at" in fields:
            return "step commit"
        case "PolicyVersion":
            return "publication"
    return None
