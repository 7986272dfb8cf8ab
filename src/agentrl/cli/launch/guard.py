"""The watchdog of a launch: when the launcher dies without a word (kill -9), it ends the groups the launcher started.

It reads `+GROUP STAGE` and `-GROUP` lines from the pipe the launcher holds. The pipe closes when the launcher is gone,
whatever the reason. The guard inherits the launch's locks, so the next launch waits until everything is down. Runs as
`python -m agentrl.cli.launch.guard GRACE_S [LOCK_DESCRIPTOR ...]`, in a session of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from agentrl.cli.launch.groups import end_groups
from agentrl.cli.launch.leftovers import LAST_GRACE_S, end_launches

NUM_STAGES = 3  # of a launch: samplers and trainer, engine, database
SLACK_S = 10.0  # of a busy machine, and between two looks


def longest_end_s(grace_s: float) -> float:
    """How long a guard may take to end everything, once its launcher is gone: whoever waits for it waits longer."""
    return NUM_STAGES * 2 * grace_s + grace_s + LAST_GRACE_S + SLACK_S


def watch(lines: Iterable[str], *, grace_s: float, lock_descriptors: Sequence[int] = ()) -> None:
    """Follow the launcher's lines to their end, then end what is still registered, lowest stage first.

    Last comes what left its group: the launch's locks, which this process holds too, tell whose it is.
    """
    stages: dict[int, int] = {}
    for line in lines:
        if line.startswith("+"):
            group_id, stage_text = line[1:].split()
            stages[int(group_id)] = int(stage_text)
        else:
            stages.pop(int(line[1:]), None)
    for stage in sorted(set(stages.values())):
        end_groups([group for group, its_stage in stages.items() if its_stage == stage], grace_s=grace_s)
    end_launches(lock_descriptors, grace_s=grace_s)


if __name__ == "__main__":
    watch(sys.stdin, grace_s=float(sys.argv[1]), lock_descriptors=[int(number) for number in sys.argv[2:]])
