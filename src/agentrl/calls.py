"""What a store keeps of calls beside their turns: results for the tool journal, and what the run has spent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from agentrl.types import DispatchKind, ToolCall, ToolResult


class ToolJournal(Protocol):
    """Results of tool calls that must not be executed twice."""

    async def find_result(self, call: ToolCall) -> ToolResult | None:
        """What the call returned when it was executed, whichever worker did; None if no result was kept."""
        ...

    async def put_result(self, call: ToolCall, result: ToolResult) -> ToolResult:
        """Keep a result; durable when it returns.

        Returns the one to use: if the call was executed twice, everybody uses the one that was written first.
        """
        ...

    async def find_equal(self, call: ToolCall, *, max_age_s: float) -> ToolResult | None:
        """What an equal call of any Record returned, at most so long ago by the server's clock; None if unknown."""
        ...

    async def put_equal(self, call: ToolCall, result: ToolResult, *, max_age_s: float) -> ToolResult:
        """Keep a result for equal calls of any Record; durable when it returns. An older one is replaced.

        Returns the one to use: that of another process if it wrote one meanwhile that is young enough.
        """
        ...


class SpendingAccount(Protocol):
    """What a run has spent or may be spending, over all its processes. Amounts are whole nano-dollars."""

    async def reserve(self, reservation: str, *, amount: int, limit: int | None) -> bool:
        """Set `amount` aside under an id of the caller's, unless the total would exceed `limit`; whether it did."""
        ...

    async def settle(self, reservation: str, *, amount: int) -> None:
        """Replace a reservation by what the call did cost. One that is not settled counts as spent."""
        ...

    async def spent(self) -> int:
        """What is spent and reserved."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCosts:
    """The stored calls of one kind to one target, added up: turns that were not committed included."""

    kind: DispatchKind
    target: str
    num_calls: int
    seconds: float
    cost_nano_usd: int
