import os
import subprocess
import sys

import pytest

from agentrl.cli.chaos.schedule import Target
from agentrl.cli.chaos.victims import find_victims, is_tool_server, target_of

ENTRY = ("python", "-m", "agentrl.cli.main")


@pytest.mark.parametrize(
    ("command_line", "target"),
    [
        ((*ENTRY, "sample", "demo", "--config", "c.json"), Target.SAMPLER),
        ((*ENTRY, "serve", "demo"), Target.ENGINE),
        ((*ENTRY, "train", "demo"), Target.TRAINER),
        (("/bin/python3", "/venv/bin/secantusd-py", "--port", "1"), Target.DATABASE),
        (("/usr/bin/mongod", "--dbpath", "data"), Target.DATABASE),
        (("python", "-m", "accelerate.commands.launch", "-m", "agentrl.cli.main", "train", "demo"), None),
        (("python", "-m", "agentrl.train.launcher", "-m", "agentrl.cli.main", "train", "demo"), None),
        (("python", "-m", "agentrl.cli.launch.guard", "15.0"), None),
        ((*ENTRY, "launch", "demo"), None),
        (("bash", "-c", "echo mongod"), None),
        (ENTRY, None),
        ((), None),
    ],
)
def test_a_process_is_known_by_its_command_line(command_line, target):
    assert target_of(command_line) is target


def test_a_samplers_own_children_are_no_tool_servers():
    assert is_tool_server(("python", "-m", "agentrl.tools.servers.calculator"))
    assert is_tool_server(("npx", "some-server"))
    assert not is_tool_server(("python", "-m", "agentrl.scoring.math_worker"))
    assert not is_tool_server(("python", "-c", "from multiprocessing.resource_tracker import main; main(9)"))
    assert not is_tool_server(())


PARENT = """
import subprocess, sys
from contextlib import ExitStack
ranks = sys.argv[1:]
with ExitStack() as stack:
    for rank in ranks:
        child = [sys.executable, "-c", "input()", "agentrl.cli.main", "sample", "demo"]
        stack.enter_context(subprocess.Popen(child, stdin=sys.stdin, env={"RANK": rank}))
    print("started", flush=True)
"""


def test_victims_are_descendants_in_the_order_of_their_rank():
    argv = [sys.executable, "-c", PARENT, "2", "0", "1"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "started\n"
        samplers = find_victims(launcher.pid, target=Target.SAMPLER)
        assert [process.environ()["RANK"] for process in samplers] == ["0", "1", "2"]
        assert find_victims(launcher.pid, target=Target.ENGINE) == []
        assert [process.pid for process in find_victims(launcher.pid, target=Target.LAUNCHER)] == [launcher.pid]
        assert launcher.stdin is not None
        launcher.stdin.close()
        launcher.wait(timeout=30)
    assert find_victims(launcher.pid, target=Target.SAMPLER) == []
    assert os.getpid() not in {process.pid for process in samplers}
