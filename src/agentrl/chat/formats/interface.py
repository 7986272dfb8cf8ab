"""What a tool-call format is: how calls look in a model's text. Pure.

A reader is total: it never raises, whatever the text. A call that cannot be read is a ToolRequest with `error`, a
sentence the model can act on, so that the loop answers it instead of dropping it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from agentrl.types import ToolRequest, ToolSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBlock:
    """A stretch of text that holds calls. Their `call_id` is empty: whoever collects blocks numbers the calls."""

    end: int  # the text from the opening up to here is no content
    text_end: int  # tags before this position stand inside a complete call: they are text
    requests: tuple[ToolRequest, ...]


class CallFormat(ABC):
    """Reads and writes the tool calls of one family of models."""

    opens: ClassVar[re.Pattern[str]]
    """Where a block of calls begins; matches at least one character."""
    how: ClassVar[str]
    """What the model is told to write, after a call that cannot be read and in a tool description."""
    frame: ClassVar[tuple[str, ...]] = ()
    """Markers around calls that are neither content nor part of a block."""
    thinking_tags: ClassVar[tuple[tuple[str, str], ...]] = (("<think>", "</think>"),)
    """Pairs that enclose reasoning, in which calls do not count."""
    describes_tools: ClassVar[bool] = False
    """Whether no chat template writes this format, so that the system message must explain it."""

    @abstractmethod
    def read(self, text: str, opening: re.Match[str], *, tools: Sequence[ToolSpec]) -> CallBlock:
        """The block that begins at `opening`, a match of `opens`. Tools help where the text does not say it all."""

    @abstractmethod
    def render(self, calls: Sequence[ToolRequest], *, tools: Sequence[ToolSpec]) -> str:
        """These calls as a model writes them: what `read` gives back, `call_id` apart.

        Raises ValueError where the format has no way to write an argument.
        """


def failed(*, error: str, name: str = "") -> ToolRequest:
    """A call that cannot be read."""
    return ToolRequest(call_id="", name=name, arguments={}, error=error)
