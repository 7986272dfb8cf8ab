"""Whom the kill campaign kills, and when: a pure function of the seed.

Instants are dealt from a deck that holds each once and is shuffled anew when it is empty. Only what happens within one
instant depends on the machine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

SAMPLER_POINTS = (
    "before claim",
    "after claim",
    "after records",
    "in generation",
    "in tool",
    "before turn documents",  # between tool result and turn commit
    "before turn header",  # in the turn commit
    "after turn header",  # between turn commit and next request
    "before record result",  # between last turn and result
    "after record result",
    "before training rows",  # between last turn and settlement
    "before settlement",  # in settlement
    "after settlement",
)
ENGINE_POINTS = ("in generation", "in weight update")
TRAINER_POINTS = (
    "before plan",
    "after plan",
    "step trained",  # between step and checkpoint
    "in checkpoint",
    "after checkpoint",  # between checkpoint and publication
    "before publication",
    "after publication",  # between publication and ledger
    "before consumption",
    "before step commit",  # in the ledger
    "after step commit",
)
DATABASE_POINTS = {
    "before claim": "sampler",
    "before records": "sampler",
    "before turn documents": "sampler",
    "before turn header": "sampler",
    "before record result": "sampler",
    "before training rows": "sampler",
    "before settlement": "sampler",
    "before plan": "trainer",
    "before publication": "trainer",
    "before consumption": "trainer",
    "before step commit": "trainer",
}
"""Who is in the middle of that write when the database dies."""
RANDOM_INSTANTS = {"sampler": 5, "engine": 4, "trainer": 3, "database": 3}
IN_WRITE_S = (0.0, 0.006)  # from the sending of a write
PAUSE_S = (0.0, 0.6)
MANY_WEIGHTS = {"sampler": 4, "engine": 2, "trainer": 1, "database": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    """One instant, and all who die in it."""

    victims: tuple[str, ...]  # names of actors, or "database"
    point: str | None  # None: any instant
    at: str | None  # the actor that reaches the point
    delay_s: float  # after the point, or before the blow at any instant


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """Who there is to kill, apart from the one database, and the instants that can be aimed at."""

    counts: Mapping[str, int]  # actors by role
    points: Mapping[str, tuple[str, ...]]  # by the role of the victim

    @property
    def instants(self) -> list[tuple[str, str | None]]:
        """(role of the victim, point or any instant), each point once."""
        targeted: list[tuple[str, str | None]] = [(role, point) for role in self.points for point in self.points[role]]
        return targeted + [(role, None) for role, count in RANDOM_INSTANTS.items() for _ in range(count)]

    @property
    def names(self) -> list[str]:
        """All who can be killed."""
        return [f"{role}_{index}" for role, count in self.counts.items() for index in range(count)] + ["database"]


SCRIPTED = Cast(
    counts={"engine": 2, "sampler": 3, "trainer": 1},
    points={
        "sampler": SAMPLER_POINTS,
        "engine": ENGINE_POINTS,
        "trainer": TRAINER_POINTS,
        "database": tuple(DATABASE_POINTS),
    },
)
"""Processes that start in a second: see kill_actors.py."""

REAL = Cast(
    counts={"engine": 2, "sampler": 2, "trainer": 1},
    points={
        "sampler": tuple(point for point in SAMPLER_POINTS if point not in {"in generation", "in tool"}),
        "trainer": tuple(point for point in TRAINER_POINTS if point != "in checkpoint"),
        "database": tuple(DATABASE_POINTS),
    },
)
"""The commands of a launch, with torch on a tiny model."""


def plan_blows(seed: int, *, cast: Cast, num_victims: tuple[int, int]) -> Iterator[Blow]:
    """The blows of a seed, without end, each with `num_victims` (from, to)."""
    rng = random.Random(f"kills {seed}")
    deck: list[tuple[str, str | None]] = []
    weights = [MANY_WEIGHTS[name.split("_")[0]] for name in cast.names]
    while True:
        if not deck:
            deck = cast.instants
            rng.shuffle(deck)
        role, point = deck.pop()
        first = _any_of(role, cast=cast, rng=rng)
        victims = {first}
        wanted = rng.randint(*num_victims)
        while len(victims) < wanted:
            victims |= set(rng.choices(cast.names, weights))
        names = tuple(sorted(victims))
        if point is None:
            yield Blow(victims=names, point=None, at=None, delay_s=rng.uniform(*PAUSE_S))
            continue
        is_database = role == "database"
        at = _any_of(DATABASE_POINTS[point], cast=cast, rng=rng) if is_database else first
        yield Blow(victims=names, point=point, at=at, delay_s=rng.uniform(*IN_WRITE_S) if is_database else 0.0)


def _any_of(role: str, *, cast: Cast, rng: random.Random) -> str:
    return "database" if role == "database" else f"{role}_{rng.randrange(cast.counts[role])}"
