"""Reads a judge's reply. Strict: what is not clearly one verdict is none, and the caller asks again or gives up.

    {"verdict": "incorrect", ...}      a JSON object, alone or in a fence          -> INCORRECT
    correct: no                        BrowseComp's field                          -> INCORRECT
    B   (B)   B. The year differs.     a letter alone or leading, where asked for  -> INCORRECT
    A clear mismatch: B                the letter that ends the last line          -> INCORRECT
    Not correct   NOT ATTEMPTED        the words, whole                            -> what they say
    correct, not incorrect             two verdicts, or a riddle                   -> None

Text before the last </think> does not count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """What a judge says of an answer."""

    CORRECT = "correct"
    INCORRECT = "incorrect"
    NOT_ATTEMPTED = "not_attempted"

    @property
    def score(self) -> float:
        """1 for a correct answer, else 0: SimpleQA gives nothing for an answer not attempted either."""
        return 1.0 if self is Verdict.CORRECT else 0.0


_LETTERS = {"A": Verdict.CORRECT, "B": Verdict.INCORRECT, "C": Verdict.NOT_ATTEMPTED}
_WORDS = {
    "correct": Verdict.CORRECT,
    "incorrect": Verdict.INCORRECT,
    "not correct": Verdict.INCORRECT,
    "wrong": Verdict.INCORRECT,
    "not attempted": Verdict.NOT_ATTEMPTED,
}
_JSON_KEYS = ("verdict", "grade", "judgement", "judgment", "correct")
_LEAD_IN = (
    r"(?:(?:the |this |your |final |predicted )*"
    r"(?:answer|response|prediction|verdict|judge?ment|grade|decision|result|it)(?: ?(?:is|was|:))? ?)*"
)
_PHRASE = re.compile(rf"{_LEAD_IN}(?P<word>not attempted|not correct|incorrect|correct|wrong)")
_CORRECT_FIELD = re.compile(r"^[^\w\n]{0,20}correct[^\w:]{0,20}:\W{0,20}(yes|no)\b", re.IGNORECASE | re.MULTILINE)
_LETTER_ALONE = re.compile(r"\W*([ABC])\W*")
_LETTER_FIRST = re.compile(r"\W{0,3}([ABC])\W{0,2}[.:)](?:\s|$)")
_LETTER_LAST = re.compile(r".*:\W*([ABC])\W*")
_FENCE = re.compile(r"\A```(?:json)?\s*(.*?)\s*```\Z", re.DOTALL)
_MAX_REPLY_CHARS = 20_000
_MAX_PHRASE_CHARS = 80


def parse_verdict(reply: str, *, letters: bool) -> Verdict | None:
    """The verdict of a judge's reply, None if it is not clearly one. Never raises.

    `letters`: the judge was asked for A (correct), B (incorrect) or C (not attempted); else a letter means nothing.
    """
    text = reply.rpartition("</think>")[2].strip()[:_MAX_REPLY_CHARS]
    if not text:
        return None
    fenced = _FENCE.match(text)
    body = fenced[1] if fenced else text
    if body.startswith("{"):
        return _from_json(body, letters=letters)
    found = set(_found(text, letters=letters))
    return found.pop() if len(found) == 1 else None


def _from_json(body: str, *, letters: bool) -> Verdict | None:
    try:
        parsed: Any = json.loads(body, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        return None
    if not isinstance(parsed, Mapping):
        return None
    values = [parsed[key] for key in _JSON_KEYS if key in parsed]
    found = {_value(value, letters=letters) for value in values}
    return found.pop() if len(found) == 1 else None


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The object; one that gives a key twice says two things. Raises ValueError."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a key is given twice")
    return fields


def _value(value: Any, *, letters: bool) -> Verdict | None:
    if isinstance(value, bool):
        return Verdict.CORRECT if value else Verdict.INCORRECT
    if not isinstance(value, str):
        return None
    if letters and (match := _LETTER_ALONE.fullmatch(value)):
        return _LETTERS[match[1]]
    words = _plain(value)
    return {"yes": Verdict.CORRECT, "no": Verdict.INCORRECT}.get(words, _WORDS.get(words))


def _found(text: str, *, letters: bool) -> Iterator[Verdict]:
    """Every verdict in a place where a verdict stands: the field, the first and the last line, the first sentence."""
    for match in _CORRECT_FIELD.finditer(text):
        yield Verdict.CORRECT if match[1].lower() == "yes" else Verdict.INCORRECT
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first_sentence = re.split(r"(?<=[.!])\s", lines[0])[0]
    for candidate in dict.fromkeys((lines[0], first_sentence, lines[-1])):
        phrase = _plain(candidate[: 2 * _MAX_PHRASE_CHARS])
        if len(phrase) <= _MAX_PHRASE_CHARS and (words := _PHRASE.fullmatch(phrase)):
            yield _WORDS[words["word"]]
        if not letters:
            continue
        if letter := _LETTER_ALONE.fullmatch(candidate) or _LETTER_FIRST.match(candidate):
            yield _LETTERS[letter[1]]
        if letter := _LETTER_LAST.fullmatch(candidate[-_MAX_PHRASE_CHARS:]):
            yield _LETTERS[letter[1]]


def _plain(text: str) -> str:
    """Lower case, `_` as a space, without markup and punctuation but for colons inside."""
    words = re.sub(r"[*`'\"“”.!#()\[\]{}$]", "", text.lower().replace("_", " "))
    return " ".join(words.split()).strip(" :,-")
