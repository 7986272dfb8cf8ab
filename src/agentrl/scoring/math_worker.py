"""Child of `math_process`: reads {"accepted", "answer"} lines, writes {"equal"} or {"error"} lines, until stdin ends.

It runs in a main thread of its own, where math-verify's alarm-based timeouts work (5 s each to parse and to compare);
what they end counts as not equal. Memory is limited, so that a huge power fails here and nowhere else.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
from collections.abc import Sequence

MAX_MEMORY_BYTES = 4 * 1024**3
_MATH_MARKS = ("$", "\\boxed", "\\(", "\\[")


def equal(accepted: Sequence[str], answer: str) -> bool:
    """Whether `answer` equals one of `accepted`, as LaTeX or as a plain expression."""
    import math_verify  # with sympy: a second, and only this process pays it

    answers = [math_verify.parse(text) for text in dict.fromkeys((_as_latex(answer), answer))]
    truths = [math_verify.parse(_as_latex(text)) for text in accepted]
    return any(math_verify.verify(truth, parsed) for truth in truths for parsed in answers)


def _as_latex(text: str) -> str:
    return text if any(mark in text for mark in _MATH_MARKS) else f"\\boxed{{{text}}}"


def main() -> None:
    """Answer questions until stdin ends."""
    with contextlib.suppress(ValueError, OSError):  # not every system can limit it
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    replies, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        question = json.loads(line)
        try:
            reply: dict[str, bool | str] = {"equal": equal(question["accepted"], question["answer"])}
        except Exception as error:  # noqa: BLE001 - process boundary: the parent raises it as ScoringError
            reply = {"error": f"{type(error).__name__}: {error}"[:500]}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
