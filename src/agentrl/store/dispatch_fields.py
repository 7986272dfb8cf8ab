"""What a dispatch document says once. There may be hundreds to a Record, so every field counts.

    a turn's model call     {"_id": "train:0:q/g0/002.1", "record_id", "task_id", "turn", "turn_id" = _id, ...}
    its first tool call     {"_id": "train:0:q/g0/002.1/1", "turn_id": "train:0:q/g0/002.1", ...}     ids say the rest
    one policy version      "tokens": {"policy_version": 3, ...}; a list "version_spans" only where there are several

Documents of schema_version 1 spell all of it out; both are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from agentrl.types import DispatchedSamplingTask, TurnTokens, VersionSpan

Fields = dict[str, Any]

_TURN_ID: Final = re.compile(r"(?P<record>(?P<task>.+)/g\d+)/(?P<turn>\d+)\.[\d.a-z]+", re.DOTALL)


def place_to_fields(dispatch: DispatchedSamplingTask, *, turn_id: str) -> Fields:
    """Where a dispatch belongs: for a turn's model call its Record, Task and turn, for others what ids do not say."""
    place = {
        "record_id": dispatch.record_id,
        "task_id": dispatch.task_id,
        "turn": dispatch.turn,
        "index": dispatch.index,
    }
    implied = implied_place(dispatch.id, turn_id=turn_id)
    if dispatch.id == turn_id:
        implied = {name: value for name, value in implied.items() if name == "index"}  # the rest is for people to find
    return {name: value for name, value in place.items() if implied.get(name) != value}


def implied_place(dispatch_id: str, *, turn_id: str) -> Fields:
    """What the ids of a dispatch and its turn say of where it belongs; nothing for ids of another form."""
    match = _TURN_ID.fullmatch(turn_id)
    number = "0" if dispatch_id == turn_id else dispatch_id.removeprefix(f"{turn_id}/")
    if match is None or not (number.isascii() and number.isdecimal()):
        return {}
    return {"record_id": match["record"], "task_id": match["task"], "turn": int(match["turn"]), "index": int(number)}


def spans_to_fields(tokens: TurnTokens) -> Fields:
    """The policy versions of a completion."""
    whole = (0, len(tokens.completion_ids))
    if [(span.start, span.end) for span in tokens.version_spans] == [whole]:
        return {"policy_version": tokens.version_spans[0].version}
    return {"version_spans": [[span.version, span.start, span.end] for span in tokens.version_spans]}


def spans_from_fields(fields: Mapping[str, Any], *, num_tokens: int) -> tuple[VersionSpan, ...]:
    """Back from a document's fields. `num_tokens`: of the completion."""
    if "policy_version" in fields:
        return (VersionSpan(version=fields["policy_version"], start=0, end=num_tokens),)
    return tuple(VersionSpan(version=version, start=start, end=end) for version, start, end in fields["version_spans"])
