"""What becomes of the tool calls of a sampler that died (docs/recovery.md).

A Record goes on from its last committed turn if every tool it has used leaves nothing behind in the sampler
(`stateless`) or keeps its results in the tool journal (`journalled`). Else it starts over.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from agentrl.protocols import Toolbox, ToolJournal
from agentrl.rollout.deadlines import stopped_clock
from agentrl.types import (
    DispatchKind,
    Record,
    Recovery,
    ResultOrigin,
    ToolCall,
    ToolRequest,
    ToolResult,
    ToolSpec,
    ToolStatus,
    Turn,
)


def unresumable_tools(turns: Sequence[Turn], *, toolbox: Toolbox) -> list[str]:
    """Names of the tools these turns used that another process cannot go on with; a tool that is gone is one."""
    declared = {tool.name: tool.recovery for tool in toolbox.list_tools()}
    used = {
        call.target
        for turn in turns
        for call in turn.tools
        if call.kind is DispatchKind.TOOL and ToolStatus(call.status).was_sent
    }
    return sorted(name for name in used if not declared.get(name, Recovery.STATEFUL).is_resumable)


def journalled_call(request: ToolRequest, *, spec: ToolSpec, record_id: str, turn: int, index: int) -> ToolCall:
    """The call as the journal knows it: by the tool's own name, however it is called in this configuration."""
    return ToolCall(
        record_id=record_id,
        turn=turn,
        index=index,
        server=spec.server,
        tool=spec.own_name,
        arguments=request.arguments,
    )


async def call_once(call: ToolCall, *, make: Callable[[], Awaitable[ToolResult]], journal: ToolJournal) -> ToolResult:
    """The result of a journalled call: the kept one, else the call is made and its result kept before it is used.

    A call whose outcome is unknown (timeout, crash) is not kept. A sampler that dies after the call and before the
    journal has its result leaves no trace of it: its successor, if the model asks again, makes the call again.
    """
    with stopped_clock():
        known = await journal.find_result(call)
    if known is not None:
        return replace(known, origin=ResultOrigin.CACHE)
    result = await make()
    if result.status not in {ToolStatus.OK, ToolStatus.TOOL_ERROR}:
        return result
    with stopped_clock():
        kept = await journal.put_result(call, replace(result, cost_nano_usd=0))
    return replace(kept, cost_nano_usd=result.cost_nano_usd)


def sampling_seed(record: Record, *, turn: int, run_seed: int) -> int:
    """The seed of a model call, 31 bits: the same for the same call of a rerun and of a takeover."""
    digest = hashlib.sha256(f"{run_seed}/{record.id}/{record.attempt}/{turn}".encode())
    return int.from_bytes(digest.digest()[:4]) >> 1
