"""Every seam between packages, as typing.Protocol. The CLI joins implementations; packages only know these.

Each Protocol has at least two implementations and one contract suite in tests/contract that runs against all of them.
Those of the store are written in store_protocols.py, those of chat models and scores in score_protocols.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from agentrl.calls import CallCosts as CallCosts
from agentrl.calls import SpendingAccount as SpendingAccount
from agentrl.calls import ToolJournal as ToolJournal
from agentrl.score_protocols import ChatModel as ChatModel
from agentrl.score_protocols import ScoreStore as ScoreStore
from agentrl.score_protocols import VerdictCache as VerdictCache
from agentrl.store_protocols import AuditStore as AuditStore
from agentrl.store_protocols import FleetStore as FleetStore
from agentrl.store_protocols import QuarantinedWork as QuarantinedWork
from agentrl.store_protocols import ReadStore as ReadStore
from agentrl.store_protocols import Store as Store
from agentrl.store_protocols import TaskLook as TaskLook
from agentrl.store_protocols import TaskState as TaskState
from agentrl.store_protocols import TaskStore as TaskStore
from agentrl.store_protocols import TrainStore as TrainStore
from agentrl.types import GenerateReply, GenerateRequest, ToolRequest, ToolResult, ToolSpec


class GenerationClient(Protocol):
    """Token in, token out (T1, T2)."""

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """One completion. Raises EngineError; never returns a partial or unaligned reply."""
        ...

    async def close(self) -> None:
        """Release connections."""
        ...


class Toolbox(Protocol):
    """The tools of a rollout, whatever serves them."""

    def list_tools(self) -> Sequence[ToolSpec]:
        """What may be called. Fixed after start."""
        ...

    async def call(self, request: ToolRequest, *, deadline_s: float) -> ToolResult:
        """Never raises for anything a tool or the model does: the outcome is typed. Cancellation passes through."""
        ...

    def for_record(self) -> AbstractAsyncContextManager[Toolbox]:
        """The same tools for one Record, with sessions of its own where a server keeps state, ended with the block."""
        ...

    async def close(self) -> None:
        """End every child process and connection."""
        ...


class MetricSink(Protocol):
    """Where one step's numbers go."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step; durable when it returns."""
        ...

    def close(self) -> None:
        """Flush."""
        ...


Scorer = Callable[[str, Mapping[str, Any], Mapping[str, Any]], Awaitable[float]]
"""(model_answer, ground_truth {"query", "answer"}, scorer_agent_config) -> score."""
