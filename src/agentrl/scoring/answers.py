r"""Finds the final answer in a model's text. The caller passes text outside thinking only, never tool output.

    schema "answer"    last complete <answer>...</answer> pair that is not empty
    schema "boxed"     last complete \boxed{...} or \fbox{...} that is not empty, braces nested
    any other name     the same as "answer" with that tag, e.g. schema "result" reads <result>...</result>

An unclosed or empty last one never hides an earlier complete one: an answer cut off by the token limit is no answer.
"""

from __future__ import annotations

import re

from agentrl.errors import ConfigError

ANSWER_SCHEMAS = ("answer", "boxed")
"""The schemas with a meaning of their own; every other tag name is a schema too."""

_TAG_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
# Escaped characters are tokens of their own, so that \{ and \} count as no brace.
_LATEX_TOKEN = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)


def check_answer_schema(schema: str) -> None:
    """Raise ConfigError unless `schema` can be used with `extract_answer`."""
    if not _TAG_NAME.fullmatch(schema):
        raise ConfigError(
            f"answer_schema = {schema!r} is no tag name; use {' or '.join(ANSWER_SCHEMAS)}, or the name of a tag"
        )


def extract_answer(content: str, *, schema: str) -> str | None:
    """The answer in `content`, stripped; None if there is none. Raises ConfigError for an impossible schema."""
    check_answer_schema(schema)
    return _last_boxed(content) if schema == "boxed" else _last_tagged(content, tag=schema)


def _last_tagged(content: str, *, tag: str) -> str | None:
    answer = None
    start: int | None = None
    for match in re.finditer(f"<(/?){re.escape(tag)}>", content):
        if not match.group(1):
            start = match.end()
            continue
        if start is not None:
            answer = content[start : match.start()].strip() or answer
        start = None
    return answer


def _last_boxed(content: str) -> str | None:
    answer, answer_start = None, -1
    open_braces: list[tuple[int, bool]] = []  # (where its text starts, whether it is a box)
    for match in _LATEX_TOKEN.finditer(content):
        token = match.group()
        if match["box"] or token == "{":
            open_braces.append((match.end(), match["box"] is not None))
        elif token == "}" and open_braces:
            start, is_box = open_braces.pop()
            text = content[start : match.start()].strip()
            if is_box and text and start > answer_start:
                answer, answer_start = text, start
    return answer
