r"""Task files: JSONL (or one JSON list) to checked rows to Tasks. All or nothing: one bad line and nothing is loaded.

    {"id": "q1", "question": "What is 6 * 7?", "answer": 42, "scorer": "math", "level": 3}
     |           |                             |             |                  kept in metadata
     item_id     query                         answer        scorer

Accepted names: see `QUERY_KEYS` and `ANSWER_KEYS`. The first one present decides; a value of null counts as absent,
while 0, false and "" are values. Accepted bytes: UTF-8 with or without a byte order mark, LF or CRLF.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn

from agentrl.errors import ConfigError, DatasetError
from agentrl.scoring import parse_expression
from agentrl.types import Answer, Task

QUERY_KEYS = ("q", "Question", "question", "query", "content", "instruction", "traj_question")
ANSWER_KEYS = ("a", "Final answer", "Final Answer", "Final sample answer", "answer", "expected_answer")
MAX_LINE_BYTES = 8 * 1024 * 1024
MAX_LIST_BYTES = 512 * 1024 * 1024

_RAW_ANSWER_KEYS = ("expected_answer", "answer")
_ID_KEYS = ("id", "task_id")
_MAX_ID_CHARACTERS = 256
_MAX_LISTED_ERRORS = 20
_MAX_DEPTH = 64
_INT64 = range(-(2**63), 2**63)
_TAG_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRow:
    """One checked row of a task file."""

    item_id: str  # unique in the file
    query: str
    answer: Answer
    scorer: str
    answer_schema: str = "answer"
    system_prompt: str | None = None
    query_prompt: str | None = None
    tools: tuple[str, ...] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


class _RowError(ValueError):
    """Why one row cannot be used."""


def load_task_rows(path: Path, *, known_scorers: Collection[str], default_scorer: str = "em") -> list[TaskRow]:
    """Read and check a task file for `agentrl tasks load`.

    Raises:
        DatasetError: the file or any row cannot be used; names the first 20 places with their reasons, and how many
            more there are.
    """
    if default_scorer not in known_scorers:
        raise DatasetError(f'scorer "{default_scorer}" is not registered; known: {", ".join(sorted(known_scorers))}')
    rows: list[TaskRow] = []
    problems: list[str] = []  # the first ones
    num_problems = 0
    places: dict[str, str] = {}
    for place, parsed in _read_objects(path):
        try:
            row = _to_row(parsed(), known_scorers=known_scorers, default_scorer=default_scorer)
            if (earlier := places.setdefault(row.item_id, place)) != place:
                raise _RowError(f'id "{row.item_id}" is already used by {earlier}')
        except _RowError as error:
            num_problems += 1
            if num_problems <= _MAX_LISTED_ERRORS:
                problems.append(f"{place}: {error}")
        else:
            rows.append(row)
    if problems:
        raise DatasetError(_summary(path, problems, num_problems=num_problems))
    if not rows:
        raise DatasetError(f"{path} has no rows; write one JSON object per line")
    return rows


def build_tasks(rows: Sequence[TaskRow], *, split: str, epoch: int, num_generations: int) -> list[Task]:
    """The Tasks of one epoch of one split, in the order of the rows, with ids "<split>:<epoch>:<item_id>".

    Raises:
        ValueError: `split` is empty or has a colon, `epoch` is negative, or `num_generations` is below 1.
    """
    if not split or ":" in split:
        raise ValueError(f'split = "{split}": it is the first part of a Task id, so it needs a name without ":"')
    if epoch < 0 or num_generations < 1:
        raise ValueError(f"epoch = {epoch}, num_generations = {num_generations}: at least 0 and 1 are needed")
    return [
        Task(
            id=f"{split}:{epoch}:{row.item_id}",
            item_id=row.item_id,
            split=split,
            epoch=epoch,
            query=row.query,
            answer=row.answer,
            scorer=row.scorer,
            answer_schema=row.answer_schema,
            num_generations=num_generations,
            system_prompt=row.system_prompt,
            query_prompt=row.query_prompt,
            tools=row.tools,
            metadata=row.metadata,
        )
        for row in rows
    ]


def _summary(path: Path, problems: Sequence[str], *, num_problems: int) -> str:
    hidden = num_problems - len(problems)
    more = [f"... and {hidden} more"] if hidden else []
    count = "1 bad row" if num_problems == 1 else f"{num_problems} bad rows"
    return "\n".join([f"{path}: {count}, nothing was loaded", *problems, *more])


def _read_objects(path: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """(place, parse) of every row; `parse` raises _RowError. Places are "line N", or "item N" of a JSON list."""
    if path.is_dir():
        raise DatasetError(f"{path} is a directory; give the JSONL file in it")
    try:
        with path.open("rb") as stream:
            if _is_list(stream):
                yield from _list_items(path, stream)
            else:
                yield from _lines(stream)
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror or error}") from error


def _is_list(stream: IO[bytes]) -> bool:
    """Whether the first character is "["; no row starts with it. Leaves the stream after a byte order mark."""
    start = stream.read(len(codecs.BOM_UTF8))
    offset = len(start) if start == codecs.BOM_UTF8 else 0
    stream.seek(offset)
    while (byte := stream.read(1)) and byte in b" \t\r\n":
        pass
    stream.seek(offset)
    return byte == b"["


def _lines(stream: IO[bytes]) -> Iterator[tuple[str, Callable[[], Any]]]:
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        size = len(line)
        chunk = line
        while size > MAX_LINE_BYTES and chunk and not chunk.endswith(b"\n"):
            chunk = stream.readline(MAX_LINE_BYTES)
            size += len(chunk)
        if size > MAX_LINE_BYTES:
            yield f"line {number}", partial(_refuse_length, size)
        elif line.strip(b" \t\r\n"):
            yield f"line {number}", partial(_parse_bytes, line.rstrip(b"\r\n"))


def _refuse_length(size: int) -> NoReturn:
    raise _RowError(f"the line has {size} bytes, above the limit of {MAX_LINE_BYTES}")


def _parse_bytes(line: bytes) -> Any:
    return _parse(_to_text(line))


def _list_items(path: Path, stream: IO[bytes]) -> Iterator[tuple[str, Callable[[], Any]]]:
    content = stream.read(MAX_LIST_BYTES + 1)
    if len(content) > MAX_LIST_BYTES:
        raise DatasetError(f"{path} is a JSON list above {MAX_LIST_BYTES} bytes; write one JSON object per line")
    try:
        items = _parse_bytes(content)
    except _RowError as error:
        raise DatasetError(f"{path} starts like a JSON list: {error}") from error
    for number, item in enumerate(items, start=1):
        yield f"item {number}", partial(_same, item)


def _same(item: Any) -> Any:
    return item


def _to_text(content: bytes) -> str:
    if b"\0" in content:
        raise _RowError("it contains a NUL byte; the file is no UTF-8 text")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _RowError(f"byte {error.start + 1} is not valid UTF-8 ({error.reason})") from error


def _parse(text: str) -> Any:
    try:
        return json.loads(
            text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_int64
        )
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise _RowError(f"not valid JSON: {error.msg} ({place})") from error
    except RecursionError as error:
        raise _RowError("the JSON is nested too deeply") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise _RowError(f'the key "{twice}" occurs twice')
    return entries


def _refuse_constant(constant: str) -> NoReturn:
    raise _RowError(f"{constant} is not JSON; use null or a string")


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise _RowError(f"the number {number[:40]} is out of range")
    return value


def _int64(number: str) -> int:
    if len(number) > 20 or int(number) not in _INT64:
        raise _RowError(f"the integer {number[:40]} does not fit 64 bits; write it as a string")
    return int(number)


def _to_row(item: Any, *, known_scorers: Collection[str], default_scorer: str) -> TaskRow:
    if not isinstance(item, dict):
        raise _RowError(f"a row must be a JSON object, not {type(item).__name__}")
    _check_content(item)
    rest = {key: value for key, value in item.items() if value is not None}
    query = _take_query(rest)
    answer = _take_answer(rest)
    item_id = _take_id(rest, item)
    scorer = _take_text(rest, "scorer") or default_scorer
    _check_scorer(scorer, known_scorers=known_scorers)
    answer_schema = _take_text(rest, "answer_schema") or "answer"
    if not _TAG_NAME.fullmatch(answer_schema):
        raise _RowError(f'answer_schema "{answer_schema}" is neither "answer" nor "boxed" nor a tag name')
    return TaskRow(
        item_id=item_id,
        query=query,
        answer=answer,
        scorer=scorer,
        answer_schema=answer_schema,
        system_prompt=_take_text(rest, "system_prompt"),
        query_prompt=_take_text(rest, "query_prompt"),
        tools=_take_tools(rest),
        metadata=_take_metadata(rest),
    )


def _check_scorer(scorer: str, *, known_scorers: Collection[str]) -> None:
    """Refuse a scorer that cannot be read, or that names one nobody registered."""
    try:
        names = parse_expression(scorer).names
    except ConfigError as error:
        raise _RowError(str(error)) from error
    for name in names:
        if name not in known_scorers:
            raise _RowError(f'scorer "{name}" is not registered; known: {", ".join(sorted(known_scorers))}')


def _check_content(item: Mapping[str, Any]) -> None:
    """Refuse what no database document and no tokenizer can hold."""
    pending: list[tuple[Any, int]] = [(item, 1)]
    while pending:
        value, depth = pending.pop()
        if depth > _MAX_DEPTH:
            raise _RowError(f"the JSON is nested deeper than {_MAX_DEPTH} levels")
        if isinstance(value, str):
            _check_string(value)
        elif isinstance(value, dict):
            pending += [(entry, depth + 1) for pair in value.items() for entry in pair]
        elif isinstance(value, list):
            pending += [(entry, depth + 1) for entry in value]


def _check_string(text: str) -> None:
    if "\0" in text:
        raise _RowError("a string contains a NUL character (\\u0000)")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _RowError("a string contains half of a surrogate pair (\\ud800-\\udfff)") from error


def _take_query(rest: dict[str, Any]) -> str:
    for key in QUERY_KEYS:
        if key in rest:
            return _query_text(rest.pop(key), name=key)
    # Conversations stay in the metadata: they may hold more than the question.
    for name, messages in (("messages", rest.get("messages")), ("raw.messages", _raw(rest).get("messages"))):
        if messages is not None:
            return _query_text(_first_user_message(messages, name=name), name=f"the first user message of {name}")
    raise _RowError(f"no query; give one of {', '.join(QUERY_KEYS)}, messages")


def _query_text(value: Any, *, name: str) -> str:
    if not isinstance(value, str):
        raise _RowError(f"{name} must be a string, not {_kind(value)}")
    if not value.strip():
        raise _RowError(f"{name} is empty")
    return value


def _first_user_message(messages: Any, *, name: str) -> Any:
    if not isinstance(messages, list):
        raise _RowError(f"{name} must be a list of messages, not {_kind(messages)}")
    for message in messages:
        if isinstance(message, dict) and message.get("role") == "user":
            return message.get("content")
    raise _RowError(f"{name} has no user message")


def _raw(rest: Mapping[str, Any]) -> Mapping[str, Any]:
    raw = rest.get("raw")
    return raw if isinstance(raw, dict) else {}


def _take_answer(rest: dict[str, Any]) -> Answer:
    for key in ANSWER_KEYS:
        if key in rest:
            return _stripped(rest.pop(key))
    for key in _RAW_ANSWER_KEYS:
        if (value := _raw(rest).get(key)) is not None:
            return _stripped(value)
    raise _RowError(f"no answer; give one of {', '.join(ANSWER_KEYS)}")


def _stripped(answer: Any) -> Answer:
    value: Answer = answer.strip() if isinstance(answer, str) else answer
    return value


def _take_id(rest: dict[str, Any], item: Mapping[str, Any]) -> str:
    """The row's own id, or one made of its content: equal content gives the same id in every file."""
    for key in _ID_KEYS:
        if key not in rest:
            continue
        value = rest.pop(key)
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise _RowError(f"{key} must be a string or an integer, not {_kind(value)}")
        item_id = str(value)
        if not item_id or len(item_id) > _MAX_ID_CHARACTERS or not item_id.isprintable():
            raise _RowError(f"{key} must be 1 to {_MAX_ID_CHARACTERS} printable characters")
        return item_id
    content = json.dumps(item, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _take_text(rest: dict[str, Any], key: str) -> str | None:
    value = rest.pop(key, None)
    if value is None or (isinstance(value, str) and value.strip()):
        return value
    raise _RowError(f"{key} must be a non-empty string, not {'an empty one' if value == '' else _kind(value)}")


def _take_tools(rest: dict[str, Any]) -> tuple[str, ...] | None:
    tools = rest.pop("tools", None)
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(name, str) and name for name in tools):
        raise _RowError("tools must be a list of tool names")
    if len(set(tools)) != len(tools):
        raise _RowError("tools names a tool twice")
    return tuple(tools)


def _take_metadata(rest: dict[str, Any]) -> dict[str, Any]:
    """The row's own metadata and every key that is left."""
    metadata = rest.pop("metadata", {})
    if not isinstance(metadata, dict):
        raise _RowError(f"metadata must be an object, not {_kind(metadata)}")
    if both := sorted(metadata.keys() & rest.keys()):
        raise _RowError(f'the key "{both[0]}" occurs both in the row and in its metadata')
    return {**rest, **metadata}


def _kind(value: Any) -> str:
    names = {list: "a list", dict: "an object", str: "a blank string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
