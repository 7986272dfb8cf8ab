"""Text from models, tools and task files, made safe to show: it cannot drive the terminal or be taken for markup."""

from __future__ import annotations

import re

from rich.text import Text

# Control characters but tab and line feed, and the marks that reorder a line.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def without_controls(content: str) -> str:
    """The text with control characters written as escapes."""
    return _CONTROLS.sub(lambda match: repr(match[0])[1:-1], content)


def plain(content: str, *, style: str = "") -> Text:
    """The text as a renderable, shown literally."""
    return Text(without_controls(content), style=style)
