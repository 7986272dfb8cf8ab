"""Which faults come, in which order, at whom and after how much waiting: a pure function of the seed.

Faults are dealt from a deck that holds every kind once and is shuffled anew when it is empty, so all kinds come before
one comes again. Only the exact instants depend on the machine: a gap is counted in trainer steps, then in seconds.
"""

from __future__ import annotations

import difflib
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from agentrl.config import RunConfig
from agentrl.errors import ConfigError


class Action(StrEnum):
    """What is done to the victim."""

    KILL = "kill"  # SIGKILL
    PAUSE = "pause"  # SIGSTOP, SIGCONT before a lease is over
    FREEZE = "freeze"  # the same, longer than a lease
    SLOW = "slow"
    RESET = "reset"
    BLACKHOLE = "blackhole"
    REPEAT = "repeat"
    LATE = "late"
    FULL = "full"


class Target(StrEnum):
    """What a fault is aimed at."""

    SAMPLER = "sampler"
    ENGINE = "engine"
    TRAINER = "trainer"
    DATABASE = "database"
    TOOL = "tool"
    LAUNCHER = "launcher"
    CONNECTION = "connection"  # of all processes to the database
    TURN = "turn"
    CLAIM = "claim"
    DISK = "disk"  # as the trainer sees it


PROCESSES = (Target.SAMPLER, Target.ENGINE, Target.TRAINER, Target.DATABASE, Target.TOOL, Target.LAUNCHER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A sort of fault."""

    action: Action
    target: Target

    @property
    def name(self) -> str:
        """How users write it."""
        return f"{self.action}-{self.target}"


KINDS: tuple[Kind, ...] = (
    *(
        Kind(action=action, target=target)
        for action in (Action.KILL, Action.PAUSE, Action.FREEZE)
        for target in PROCESSES
    ),
    Kind(action=Action.SLOW, target=Target.CONNECTION),
    Kind(action=Action.RESET, target=Target.CONNECTION),
    Kind(action=Action.BLACKHOLE, target=Target.CONNECTION),
    Kind(action=Action.REPEAT, target=Target.TURN),
    Kind(action=Action.LATE, target=Target.CLAIM),
    Kind(action=Action.FULL, target=Target.DISK),
)

HELD_LEASES: Mapping[Action, tuple[float, float]] = {
    Action.PAUSE: (0.2, 0.7),
    Action.FREEZE: (1.2, 1.6),
    Action.SLOW: (0.8, 2.0),
    Action.RESET: (0.3, 1.0),
    Action.BLACKHOLE: (0.2, 1.4),
}
"""How long an action lasts, in leases. The others are over at once, or when they had their effect."""
LATENCY_S = (0.01, 0.15)
AFTER_STEPS = (0, 1, 1, 2)
AFTER_LEASES = (0.0, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFault:
    """One fault of the schedule."""

    index: int
    kind: Kind
    victim: int  # which of its target's processes, from 0
    after_steps: int  # trainer steps after the fault before has ended
    after_s: float  # then seconds
    held_s: float  # how long it lasts; 0: see HELD_LEASES
    latency_s: float  # of each piece of traffic, for `slow`


def schedule(
    seed: int, *, kinds: Sequence[Kind], num_processes: Mapping[Target, int], lease_s: float
) -> Iterator[PlannedFault]:
    """The faults of a seed, without end. `num_processes`: how many processes a target has; 1 where it is not named."""
    rng = random.Random(f"chaos {seed}")
    deck: list[Kind] = []
    index = 0
    while True:
        if not deck:
            deck = list(kinds)
            rng.shuffle(deck)
        kind = deck.pop()
        low, high = HELD_LEASES.get(kind.action, (0.0, 0.0))
        yield PlannedFault(
            index=index,
            kind=kind,
            victim=rng.randrange(num_processes.get(kind.target, 1)),
            after_steps=rng.choice(AFTER_STEPS),
            after_s=round(lease_s * rng.uniform(*AFTER_LEASES), 3),
            held_s=round(lease_s * rng.uniform(low, high), 3),
            latency_s=round(rng.uniform(*LATENCY_S), 3),
        )
        index += 1


def num_processes(config: RunConfig) -> dict[Target, int]:
    """Processes by target, as a launch of this configuration starts them."""
    return {
        Target.SAMPLER: config.rollout.num_samplers,
        Target.TOOL: config.rollout.num_samplers * config.tools.tool_sessions_per_server,
        Target.TRAINER: config.train.num_processes,
        Target.DISK: config.train.num_processes,
    }


def available_kinds(config: RunConfig) -> tuple[Kind, ...]:
    """The kinds a run of this configuration can suffer: nothing is done to what the launch does not start itself."""
    absent: set[Target] = set()
    if config.store.db_connection_string is not None:
        absent |= {Target.DATABASE, Target.CONNECTION}
    if config.is_supervised:
        absent |= {Target.SAMPLER, Target.ENGINE, Target.TOOL, Target.TURN, Target.CLAIM}
    if config.tools.mcp_config is None:
        absent.add(Target.TOOL)
    if sys.platform != "linux":
        absent.add(Target.DISK)  # limits of another process can be set on Linux alone
    return tuple(kind for kind in KINDS if kind.target not in absent)


def choose_kinds(text: str | None, *, available: Sequence[Kind]) -> tuple[Kind, ...]:
    """The kinds that a comma-separated list of kinds, actions or targets names; all available ones without a list.

    Raises ConfigError for a word that names none, or none that is available.
    """
    if text is None:
        return tuple(available)
    chosen: list[Kind] = []
    for word in (part.strip() for part in text.split(",")):
        found = [kind for kind in available if word in {kind.name, kind.action, kind.target}]
        if not found:
            raise _no_such_kind(word, available=available)
        chosen += [kind for kind in found if kind not in chosen]
    return tuple(chosen)


def _no_such_kind(word: str, *, available: Sequence[Kind]) -> ConfigError:
    names = [kind.name for kind in available]
    if word in {known for kind in KINDS for known in (kind.name, kind.action, kind.target)}:
        return ConfigError(f"--kinds: {word!r}: this run has no such process of its own; possible: {', '.join(names)}")
    near = difflib.get_close_matches(word, names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(names)}"
    return ConfigError(f"--kinds: {word!r} is no kind, action or target of a fault; {hint}")
