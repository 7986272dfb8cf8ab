"""The processes of a launch by what they do, found as descendants of the launcher that chaos started itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

from agentrl.cli.chaos.schedule import Target

_COMMANDS = {"sample": Target.SAMPLER, "serve": Target.ENGINE, "train": Target.TRAINER}
_DATABASES = frozenset({"mongod", "secantusd", "secantusd-py"})
_ENTRY = "agentrl.cli.main"
_WRAPPERS = ("agentrl.train.launcher", "accelerate.commands.launch")  # they start the ranks, and are none
_OWN_CHILDREN = ("agentrl.scoring", "multiprocessing")  # of samplers, besides tool servers


def find_victims(launcher_pid: int, *, target: Target) -> list[psutil.Process]:
    """The running processes of one target, in the order of their index; empty if there are none at the moment."""
    try:
        launcher = psutil.Process(launcher_pid)
        descendants = launcher.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    if target is Target.LAUNCHER:
        return [launcher]
    if target is Target.DISK:
        target = Target.TRAINER
    if target is Target.TOOL:
        return [child for sampler in _of(descendants, Target.SAMPLER) for child in _tool_servers(sampler)]
    return _of(descendants, target)


def target_of(command_line: Sequence[str]) -> Target | None:
    """What a process started with this command line is, if it is a part of a run."""
    if any(word in _WRAPPERS for word in command_line):
        return None
    if _ENTRY in command_line[:-1]:
        return _COMMANDS.get(command_line[command_line.index(_ENTRY) + 1])
    if any(Path(word).name in _DATABASES for word in command_line[:2]):
        return Target.DATABASE
    return None


def is_tool_server(command_line: Sequence[str]) -> bool:
    """Whether a direct child of a sampler with this command line is one of its tool servers."""
    return bool(command_line) and not any(own in word for own in _OWN_CHILDREN for word in command_line)


def _of(processes: Iterable[psutil.Process], target: Target) -> list[psutil.Process]:
    found = []
    for process in processes:
        try:
            if process.status() != psutil.STATUS_ZOMBIE and target_of(process.cmdline()) is target:
                found.append((int(process.environ().get("RANK", "0")), process.pid, process))
        except psutil.Error:
            continue
    return [process for _, _, process in sorted(found, key=lambda entry: entry[:2])]


def _tool_servers(sampler: psutil.Process) -> list[psutil.Process]:
    try:
        children = [child for child in sampler.children() if child.status() != psutil.STATUS_ZOMBIE]
        found = [child for child in children if is_tool_server(child.cmdline())]
    except psutil.Error:  # one of them ended while it was looked at
        return []
    return sorted(found, key=lambda process: process.pid)
