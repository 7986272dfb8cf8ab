"""Runs math-verify in a child process, because a model can write an expression whose evaluation never ends.

Neither a thread nor a signal stops sympy inside one long C call, so the child is ended when it does not answer in
time, and the next question starts a new one. The child also keeps sympy (slow to import, large) out of samplers that
never need it. It ends with its parent: it reads questions from stdin.
"""

from __future__ import annotations

import atexit
import json
import select
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO, Any

from agentrl.errors import ScoringError

ANSWER_TIMEOUT_S = 30.0
_EXIT_TIMEOUT_S = 5.0


class MathProcess:
    """One child process, started on first use; questions of several threads are asked one after the other."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def verify(self, accepted: Sequence[str], answer: str) -> bool:
        """Whether `answer` equals one of `accepted`. Blocks; call it in a thread. Raises ScoringError."""
        question = json.dumps({"accepted": list(accepted), "answer": answer})
        with self._lock:
            reply = self._ask(question)
        if "error" in reply:
            raise ScoringError(f"math-verify failed: {reply['error']}")
        return bool(reply["equal"])

    def close(self) -> None:
        """End the child, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate(timeout=_EXIT_TIMEOUT_S)

    def _ask(self, question: str) -> dict[str, Any]:
        stdin, stdout = self._pipes()
        try:
            stdin.write(question + "\n")
            stdin.flush()
            if not select.select([stdout], [], [], self._timeout_s)[0]:
                raise ScoringError(f"math-verify did not decide within {self._timeout_s:g} s")
            line = stdout.readline()
            if not line:
                raise ScoringError("math-verify's process died; was it out of memory?")
            reply: dict[str, Any] = json.loads(line)
        except OSError as error:
            self.close()
            raise ScoringError(f"math-verify's process died: {error}") from error
        except ScoringError:
            self.close()
            raise
        return reply

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "agentrl.scoring.math_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C in the terminal ends the sampler, which ends it
            )
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        return stdin, stdout


MATH_PROCESS = MathProcess(timeout_s=ANSWER_TIMEOUT_S)
atexit.register(MATH_PROCESS.close)
