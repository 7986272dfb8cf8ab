"""What of a tool's result the model gets to see: without leaked answers, summarised or cut if it is long.

result ─► leak filter ─► browse agent, for its tools ─► cut to max_tool_result_tokens ─► shown, with notes
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.chat import ChatFormat
from agentrl.config import RolloutConfig
from agentrl.rollout.browse import BrowseCall, Browser
from agentrl.rollout.cutting import cut_text
from agentrl.rollout.leaks import LeakFilter
from agentrl.types import Task, ToolRequest, ToolResult, ToolStatus

NUM_LEAKS = "num_leaks"  # in the response of a call: blocked addresses it asked for and pieces taken out
FULL_CHARACTERS = "full_characters"  # length of a result that was cut or summarised


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownResult:
    """A result as the model sees it."""

    content: str
    notes: Mapping[str, Any]  # kept in the response of the call
    browse_calls: tuple[BrowseCall, ...] = ()


def refused_address(call: ToolRequest, *, rollout: RolloutConfig) -> ToolResult | None:
    """The answer to a call that names a blocked address; None: send it."""
    found = LeakFilter.from_setting(rollout.blocked_addresses).find(dict(call.arguments))
    if found is None:
        return None
    return ToolResult(
        status=ToolStatus.BAD_ARGUMENTS,
        content="This address may not be opened here: it publishes benchmark answers. Use other sources.",
        error=f"blocked address {found}",
    )


async def show_result(
    result: ToolResult,
    *,
    call: ToolRequest,
    task: Task,
    rollout: RolloutConfig,
    chat: ChatFormat,
    browser: Browser | None,
) -> ShownResult:
    """Prepare a result. A browse agent that gives no reply leaves the result to the cut; its failure is kept."""
    leaks = LeakFilter.from_setting(rollout.blocked_addresses)
    content, num_leaks = leaks.clean(result.content)
    num_leaks += leaks.find(dict(call.arguments)) is not None
    notes: dict[str, Any] = {NUM_LEAKS: num_leaks} if num_leaks else {}
    full = content
    browse_calls: tuple[BrowseCall, ...] = ()
    if browser is not None and result.status is ToolStatus.OK:
        asked = await browser.summarise_result(content, tool=call.name, arguments=call.arguments, query=task.query)
        browse_calls = tuple(asked)
        if asked and all(one.failure is None for one in asked):
            content = "\n---\n".join(one.text for one in asked)
    if rollout.max_tool_result_tokens is not None:
        content = cut_text(content, max_tokens=rollout.max_tool_result_tokens, encode=chat.encode_text)
    if content != full:
        notes[FULL_CHARACTERS] = len(full)
    return ShownResult(content=content, notes=notes, browse_calls=browse_calls)
