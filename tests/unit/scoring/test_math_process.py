import asyncio
import fcntl
import os
import signal
import subprocess
import sys
import termios
import threading
import time

import psutil
import pytest

from agentrl.errors import ScoringError
from agentrl.scoring.math_process import MathProcess, MathProcesses


@pytest.fixture
def process():
    process = MathProcess(timeout_s=30)
    yield process
    process.close()


def child_of(process):
    return psutil.Process(process._process.pid)


def num_waiting_bytes(process):
    pipe = process._process.stdin.fileno()
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_nothing_is_started_before_the_first_question(process):
    before = psutil.Process().children()
    process.close()
    assert psutil.Process().children() == before
    assert process._process is None


def test_questions_from_several_threads_get_their_own_answers(process):
    answers = {}

    def ask(n):
        answers[n] = process.verify([f"{n} + 1"], f"{n + 1 if n % 2 else n}")

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert answers == {n: bool(n % 2) for n in range(8)}


def test_an_expression_that_never_ends_ends_the_child_and_the_next_question_is_answered():
    process = MathProcess(timeout_s=30)
    assert process.verify(["1/2"], "\\frac{1}{2}")
    child = child_of(process)
    process._timeout_s = 0.5
    with pytest.raises(ScoringError, match=r"within 0\.5 s"):
        process.verify(["3"], "10^{10^{10}}")
    assert not child.is_running()
    process._timeout_s = 30
    assert process.verify(["1/2"], "2/4")
    process.close()


async def test_answers_made_to_take_long_are_not_equal_and_the_answers_behind_them_get_theirs():
    processes = MathProcesses(num_children=1, timeout_s=30, cpu_limit_s=0.3)
    try:
        slow = [processes.verify(["x"], f"(x+y+z+w)^{{{power}}}") for power in (60, 61)]
        assert await asyncio.gather(*slow, processes.verify(["1/2"], "2/4")) == [False, False, True]
    finally:
        processes.close()


def test_a_child_that_the_system_ends_for_its_processor_time_means_not_equal(process):
    assert process.verify(["1/2"], "2/4")
    child = child_of(process)
    child.suspend()
    answers = []
    asking = threading.Thread(target=lambda: answers.append(process.verify(["1/2"], "2/4")))
    asking.start()
    until = time.monotonic() + 10
    while not num_waiting_bytes(process) and time.monotonic() < until:  # the question is on its way
        time.sleep(0.005)
    child.send_signal(signal.SIGXCPU)
    child.resume()
    asking.join(timeout=30)
    assert answers == [False]
    assert process.verify(["1/2"], "2/4")


def test_a_child_that_is_killed_is_replaced(process):
    assert process.verify(["1/2"], "2/4")
    child = child_of(process)
    os.kill(child.pid, signal.SIGKILL)
    child.wait(timeout=10)
    assert process.verify(["1/2"], "2/4")


def test_closing_leaves_no_child_and_may_be_repeated(process):
    assert process.verify(["x + x"], "2x")
    child = child_of(process)
    process.close()
    process.close()
    assert not child.is_running()


def test_importing_the_scorers_does_not_import_sympy():
    code = "import sys, agentrl.scoring; print({'sympy', 'math_verify'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
