"""Runs math-verify in child processes, because a model can write an expression whose evaluation never ends.

Neither a thread nor a signal stops sympy inside one long C call, so a child that uses too much processor time ends,
and the next question starts a new one. The children also keep sympy (slow to import, large) out of samplers that
never need it. They end with their parent: they read questions from stdin. There are a few of them with threads of
their own, so that answers made to take long hold up neither each other for long nor anything else of the sampler.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

from agentrl.errors import ScoringError

CPU_LIMIT_S = 2.0
"""Processor time of one question; see `math_worker`."""
ANSWER_TIMEOUT_S = 60.0
"""Of one question. Only a machine that gives a child hardly any processor time gets there: see `math_worker`."""
QUEUE_TIMEOUT_S = 1800.0
"""Of a question with the wait for those before it, each of which is bounded by itself."""
_MAX_CHILDREN = 4
_EXIT_TIMEOUT_S = 5.0


class MathProcess:
    """One child process, started on first use; questions of several threads are asked one after the other."""

    def __init__(self, *, timeout_s: float, cpu_limit_s: float = CPU_LIMIT_S) -> None:
        self._timeout_s = timeout_s
        self._cpu_limit_s = cpu_limit_s
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
            if not line and self._ended_by(signal.SIGXCPU):
                self.close()
                return {"equal": False}
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

    def _ended_by(self, number: signal.Signals) -> bool:
        """Whether that signal ended the child, whose pipe is closed."""
        return self._process is not None and self._process.wait(timeout=_EXIT_TIMEOUT_S) == -number

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "agentrl.scoring.math_worker", f"{self._cpu_limit_s:g}"],
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


class MathProcesses:
    """Up to `num_children` children, each started when the others are busy."""

    def __init__(self, *, num_children: int, timeout_s: float, cpu_limit_s: float = CPU_LIMIT_S) -> None:
        self._idle: queue.LifoQueue[MathProcess] = queue.LifoQueue()
        for _ in range(num_children):
            self._idle.put(MathProcess(timeout_s=timeout_s, cpu_limit_s=cpu_limit_s))
        self._all = tuple(self._idle.queue)
        self._threads = ThreadPoolExecutor(num_children, thread_name_prefix="math")

    async def verify(self, accepted: Sequence[str], answer: str) -> bool:
        """Whether `answer` equals one of `accepted`. Raises ScoringError."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._verify, accepted, answer)

    def close(self) -> None:
        """End all children."""
        for process in self._all:
            process.close()

    def _verify(self, accepted: Sequence[str], answer: str) -> bool:
        process = self._idle.get_nowait()  # there are as many as threads
        try:
            return process.verify(accepted, answer)
        finally:
            self._idle.put(process)


MATH_PROCESSES = MathProcesses(num_children=min(_MAX_CHILDREN, os.cpu_count() or 1), timeout_s=ANSWER_TIMEOUT_S)
atexit.register(MATH_PROCESSES.close)
