"""`gaia` and `sub_em`: rules of question-answering benchmarks.

`gaia` follows the leaderboard's scorer (Mialon et al. 2023): the truth's kind decides. A number is compared as a
number (currency, %, thousands commas off), a list (with , or ;) element by element in order, anything else as text
without letter case, spaces and punctuation. `sub_em` asks whether the truth's words occur in the answer, in a row.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Mapping
from typing import Any

from agentrl.scoring.ground_truth import accepted_answers, as_number
from agentrl.scoring.scorers import normalise

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_SEPARATOR = re.compile(r"[,;]")


async def gaia(answer: str, ground_truth: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    """`gaia`: 1 if the answer equals an accepted one by the rules above."""
    del config
    return float(any(_equal(answer, truth) for truth in accepted_answers(ground_truth)))


async def sub_exact_match(answer: str, ground_truth: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    """`sub_em`: 1 if an accepted answer's words occur in the answer in a row; "no" is not in "north"."""
    del config
    words = f" {normalise(answer)} "
    return float(any(_occurs(truth, words=words, answer=answer) for truth in accepted_answers(ground_truth)))


def _equal(answer: str, truth: str) -> bool:
    number = as_number(_bare_number(truth))
    if number is not None:
        return as_number(_bare_number(answer)) == number
    if _SEPARATOR.search(truth):
        return _lists_equal(_SEPARATOR.split(answer), _SEPARATOR.split(truth))
    return _text(answer) == _text(truth)


def _lists_equal(answers: list[str], truths: list[str]) -> bool:
    if len(answers) != len(truths):
        return False
    for answer, truth in zip(answers, truths, strict=True):
        number = as_number(_bare_number(truth))
        if number is not None:
            if as_number(_bare_number(answer)) != number:
                return False
        elif _folded(answer) != _folded(truth):  # as the leaderboard: punctuation counts within a list
            return False
    return True


def _bare_number(text: str) -> str:
    return text.strip().removesuffix(".").removesuffix("%").strip()


def _folded(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


def _text(text: str) -> str:
    """Without letter case, spaces and punctuation; a text of punctuation alone is what it is."""
    folded = _folded(text)
    return folded.translate(_PUNCTUATION) or folded


def _occurs(truth: str, *, words: str, answer: str) -> bool:
    normal = normalise(truth)
    return f" {normal} " in words if normal else truth.strip().casefold() in answer.casefold()
