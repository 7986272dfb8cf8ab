"""The built-in scorers: `em`, `f1`, `math`, `choice`. Each takes (answer, ground_truth, config) and returns 0.0 to 1.0.

`ground_truth` is {"query", "answer"}; where several answers are accepted, the best match counts. `em` and `f1`
follow SQuAD (Rajpurkar et al. 2016): letter case, punctuation, articles and spacing do not count; numbers are compared
as numbers, so that -5 is not 5 and 888.0 is 888.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import Any

from agentrl.errors import ScoringError
from agentrl.scoring.ground_truth import accepted_answers, as_number
from agentrl.scoring.math_process import MATH_PROCESSES

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_MATH_TOLERANCE = Decimal("0.0000005")  # six decimals, as math-verify rounds
_MAX_MATH_CHARS = 2000
_LETTER_ALONE = re.compile(r"\(?\[?([A-Za-z])[)\].:]*")
_LETTER_FIRST = re.compile(r"(?:[(\[]([A-Za-z])[)\]]|([A-Za-z])[).:])(?:\s|$)")
_LETTER_NAMED = re.compile(
    r"(?i:\b(?:answer|option|choice)\b(?:\s+(?:is|would be|should be))?\s*:?\s*)[(\[]?"
    r"([A-Z](?![A-Za-z])|[a-z](?=[)\].\s]*$))"
)


async def exact_match(answer: str, ground_truth: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    """`em`: 1 if the normalised answer equals a normalised accepted one."""
    del config
    given = _Text(answer)
    return float(any(_equal(given, _Text(accepted)) for accepted in accepted_answers(ground_truth)))


async def token_f1(answer: str, ground_truth: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    """`f1`: harmonic mean of precision and recall over words, best accepted answer."""
    del config
    given = _Text(answer)
    return max(_f1(given, _Text(accepted)) for accepted in accepted_answers(ground_truth))


async def math_equal(answer: str, ground_truth: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    """`math`: 1 if the answer is mathematically equal to an accepted one. Plain numbers never leave this process."""
    del config
    accepted = accepted_answers(ground_truth)
    if any(answer.strip() == truth.strip() for truth in accepted):
        return 1.0
    undecided = []
    for truth in accepted:
        equal = _numbers_equal(answer, truth)
        if equal:
            return 1.0
        if equal is None:
            undecided.append(truth)
    if not undecided or not answer.strip() or len(answer) > _MAX_MATH_CHARS:
        return 0.0
    return float(await MATH_PROCESSES.verify(undecided, answer))


async def letter_choice(answer: str, ground_truth: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    """`choice`: 1 if the letter chosen is an accepted one; reads "B", "(b)", "B. text" and "The answer is B"."""
    del config
    letters = set()
    for accepted in accepted_answers(ground_truth):
        letter = choice_letter(accepted)
        if letter is None:
            raise ScoringError(f"the ground truth {accepted!r} names no letter; scorer choice needs one, like B")
        letters.add(letter)
    return float(choice_letter(answer) in letters)


def choice_letter(text: str) -> str | None:
    """The letter of a multiple-choice answer, upper case; None if it is not clear which."""
    bare = re.sub(r"\\text(?:bf|rm)?\{([^{}]*)\}", r"\1", text).replace("*", "").replace("$", "")
    bare = " ".join(bare.split())  # long runs of spaces would take the patterns below quadratic time
    if match := _LETTER_ALONE.fullmatch(bare):
        return match.group(1).upper()
    if match := _LETTER_FIRST.match(bare):
        return (match.group(1) or match.group(2)).upper()
    named = [match.group(1) for match in _LETTER_NAMED.finditer(bare)]
    return named[-1].upper() if named else None


@dataclass(frozen=True)
class _Text:
    """A text and what comparing it needs, computed once however many accepted answers there are."""

    raw: str

    @cached_property
    def normal(self) -> str:
        return normalise(self.raw)

    @cached_property
    def words(self) -> Counter[str]:
        return Counter(self.normal.split())

    @cached_property
    def number(self) -> Decimal | None:
        return as_number(self.raw)


def _equal(answer: _Text, accepted: _Text) -> bool:
    if answer.number is not None and accepted.number is not None:
        return answer.number == accepted.number
    if not accepted.normal:  # only articles or punctuation: then they are what counts
        return answer.raw.strip().casefold() == accepted.raw.strip().casefold()
    return answer.normal == accepted.normal


def _f1(answer: _Text, accepted: _Text) -> float:
    both_numbers = answer.number is not None and accepted.number is not None
    common = (accepted.words & answer.words).total()
    if both_numbers or not accepted.words or not common:
        return float(_equal(answer, accepted))
    precision, recall = common / answer.words.total(), common / accepted.words.total()
    return 2 * precision * recall / (precision + recall)


def normalise(text: str) -> str:
    """Without letter case, punctuation, articles and spacing, as SQuAD compares."""
    lowered = unicodedata.normalize("NFKC", text).lower()
    return " ".join(_ARTICLES.sub(" ", lowered.translate(_PUNCTUATION)).split())


def _numbers_equal(answer: str, accepted: str) -> bool | None:
    """Whether two plain numbers are equal; None unless both are."""
    numbers = as_number(answer), as_number(accepted)
    if numbers[0] is None or numbers[1] is None:
        return None
    return abs(numbers[0] - numbers[1]) <= _MATH_TOLERANCE
