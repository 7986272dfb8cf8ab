"""Child of `math_process`: reads {"accepted", "answer"} lines, writes {"equal"} or {"error"} lines, until stdin ends.

A question gets as many seconds of processor time as the first argument says, so that a busy machine changes no verdict;
an answer that needs more, or more memory than there is, is not equal. Inside one long call of a C function no signal
handler runs: then the system ends this process with SIGXCPU a second later, and the parent knows what that means.
"""

from __future__ import annotations

import contextlib
import json
import math
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType

MAX_MEMORY_BYTES = 1024**3
_REPEAT_S = 0.2  # what swallows the first interruption meets another one
_MATH_MARKS = ("$", "\\boxed", "\\(", "\\[")


class _OutOfTimeError(BaseException):
    """No Exception: sympy and math-verify catch those."""


def equal(accepted: Sequence[str], answer: str) -> bool:
    """Whether `answer` equals one of `accepted`, as LaTeX or as a plain expression."""
    import math_verify  # with sympy: a second, and only this process pays it

    answers = [math_verify.parse(text) for text in dict.fromkeys((_as_latex(answer), answer))]
    truths = [math_verify.parse(_as_latex(text)) for text in accepted]
    return any(math_verify.verify(truth, parsed) for truth in truths for parsed in answers)


def _as_latex(text: str) -> str:
    return text if any(mark in text for mark in _MATH_MARKS) else f"\\boxed{{{text}}}"


@contextlib.contextmanager
def _limited_cpu(limit_s: float) -> Iterator[None]:
    """Raises _OutOfTimeError in the block when it has used `limit_s`; a second later the process is ended."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    last_s = math.ceil(used.ru_utime + used.ru_stime + limit_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (last_s, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    signal.setitimer(signal.ITIMER_PROF, limit_s, _REPEAT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise _OutOfTimeError


def _reply(question: str, *, limit_s: float) -> dict[str, bool | str]:
    asked = json.loads(question)
    try:
        with _limited_cpu(limit_s):
            return {"equal": equal(asked["accepted"], asked["answer"])}
    except (_OutOfTimeError, MemoryError):
        return {"equal": False}
    except Exception as error:  # noqa: BLE001 - process boundary: the parent raises it as ScoringError
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def main() -> None:
    """Answer questions until stdin ends."""
    with contextlib.suppress(ValueError, OSError):  # not every system can limit it
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    import math_verify  # noqa: F401 - before the first question, whose time it would take

    limit_s = float(sys.argv[1])
    signal.signal(signal.SIGPROF, _interrupt)
    replies, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        replies.write(json.dumps(_reply(line, limit_s=limit_s)) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
