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


def plan_blows(seed: int, *, counts: Mapping[str, int], num_victims: tuple[int, int]) -> Iterator[Blow]:
    """The blows of a seed, without end, each with `num_victims` (from, to). `counts`: actors by role, no database."""
    rng = random.Random(f"kills {seed}")
    deck: list[tuple[str, str | None]] = []
    names = [f"{role}_{index}" for role, count in counts.items() for index in range(count)] + ["database"]
    weights = [MANY_WEIGHTS[name.split("_")[0]] for name in names]
    while True:
        if not deck:
            deck = instants(counts)
            rng.shuffle(deck)
        role, point = deck.pop()
        first = "database" if role == "database" else f"{role}_{rng.randrange(counts[role])}"
        victims = {first}
        wanted = rng.randint(*num_victims)
        while len(victims) < wanted:
            victims |= set(rng.choices(names, weights))
        if point is None:
            yield Blow(victims=tuple(sorted(victims)), point=None, at=None, delay_s=rng.uniform(*PAUSE_S))
            continue
        is_database = role == "database"
        witness = DATABASE_POINTS[point] if is_database else role
        at = f"{witness}_{rng.randrange(counts[witness])}" if is_database else first
        delay_s = rng.uniform(*IN_WRITE_S) if is_database else 0.0
        yield Blow(victims=tuple(sorted(victims)), point=point, at=at, delay_s=delay_s)


def instants(counts: Mapping[str, int]) -> list[tuple[str, str | None]]:
    """(role of the victim, point or any instant), once each."""
    points: dict[str, tuple[str, ...]] = {
        "sampler": SAMPLER_POINTS,
        "engine": ENGINE_POINTS,
        "trainer": TRAINER_POINTS,
        "database": tuple(DATABASE_POINTS),
    }
    roles = [role for role in points if role == "database" or counts.get(role)]
    targeted: list[tuple[str, str | None]] = [(role, point) for role in roles for point in points[role]]
    return targeted + [(role, None) for role in roles for _ in range(RANDOM_INSTANTS[role])]
