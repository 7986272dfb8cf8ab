"""Reads a Task's `answer` for the scorers: a string, number, bool, or a list of accepted ones."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from agentrl.errors import ScoringError

_NUMBER = re.compile(r"[+-]?(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)?(?:\.[0-9]+)?")
_MAX_NUMBER_CHARS = 1000


def accepted_answers(ground_truth: Mapping[str, Any]) -> tuple[str, ...]:
    """The accepted answers as text, at least one. 0 and False are answers. Raises ScoringError."""
    if "answer" not in ground_truth:
        raise ScoringError("the ground truth has no `answer`")
    answer = ground_truth["answer"]
    texts = tuple(text for item in (answer if isinstance(answer, list) else [answer]) for text in _as_texts(item))
    if not texts:
        raise ScoringError("the ground truth is an empty list: nothing would be accepted")
    return texts


def as_number(text: str) -> Decimal | None:
    """The number `text` is, if it is nothing else: 888, -3.50, 1,000, $5 and a full stop at the end are fine."""
    bare = text.strip().replace("\u2212", "-").lstrip("$€£").removesuffix(".")
    if not bare or len(bare) > _MAX_NUMBER_CHARS or not _NUMBER.fullmatch(bare) or not any(map(str.isdigit, bare)):
        return None
    return Decimal(bare.replace(",", ""))


def _as_texts(item: Any) -> tuple[str, ...]:
    if isinstance(item, bool):
        return ("yes", "true") if item else ("no", "false")
    if isinstance(item, str):
        if not item.strip():
            raise ScoringError("the ground truth is empty text: nothing would be accepted")
        return (item,)
    if isinstance(item, int) or (isinstance(item, float) and math.isfinite(item)):
        return (str(item),)
    raise ScoringError(f"the ground truth {item!r} is neither text, nor a number, nor a bool, nor a list of them")
