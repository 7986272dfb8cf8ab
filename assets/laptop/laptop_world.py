"""The little world the laptop model lives in: problems whose answer needs one to three tool calls, and a flawed agent.

    What is 37*24?                     calculator("37*24") -> 888
    What is (37+24)*3?                 calculator("37+24") -> 61, calculator("61*3") -> 183
    How many bridges has Emba?         search("Emba") -> "Emba has 42 bridges." -> 42
    How many bridges has Emba plus 7?  search("Emba"), calculator("42+7") -> 49

Problems are drawn from one of two disjoint halves of the world: the innermost operand pair, or the entity, decides
whether a problem may be trained on or is held out. Everything follows from the seed.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

MAX_OPERAND = 99
MAX_VALUE = 9999
HELD_OUT_PART = 5  # one in so many operand pairs and entities is held out
OPERATORS: Mapping[str, Callable[[int, int], int]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
}
BOXED_PROMPT = "Put the answer in a box."


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCall:
    """One tool call of the shortest solution. `{previous}` in the argument is the number the last call gave."""

    tool: str
    argument: str

    def argument_after(self, previous: str) -> str:
        """The argument once the previous number is known."""
        return self.argument.replace("{previous}", previous)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A question, its answer and the calls that lead there."""

    kind: str  # "calculator" | "search" | "search_calculator"
    query: str
    answer: str
    calls: tuple[PlannedCall, ...]
    boxed: bool  # answered as \\boxed{...} and graded by `math`, else <answer>...</answer> and `em`


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Which problems, and how often."""

    search: float = 0.12
    search_calculator: float = 0.0
    hops: tuple[float, float, float] = (0.4, 0.4, 0.2)  # calculator problems with one, two and three operations
    boxed: float = 0.1  # of calculator problems


class World:
    """Draws problems from one half of the operand pairs and entities, and answers tool calls as the servers do."""

    def __init__(self, facts: Mapping[str, tuple[str, int]], *, held_out: bool, mix: Mix = Mix()) -> None:
        self._facts = facts
        self._entities = [name for index, name in enumerate(sorted(facts)) if (index % HELD_OUT_PART == 0) == held_out]
        self._held_out = held_out
        self._mix = mix

    def draw(self, rng: random.Random) -> Problem:
        """One problem."""
        share = rng.random()
        if share < self._mix.search + self._mix.search_calculator:
            return self._draw_search(rng, chained=share >= self._mix.search)
        return self._draw_calculator(rng)

    def _draw_calculator(self, rng: random.Random) -> Problem:
        hops = rng.choices((1, 2, 3), weights=self._mix.hops)[0]
        left, right = self._draw_pair(rng)
        operator = _fitting_operator(left, right, rng)
        value = OPERATORS[operator](left, right)
        text = f"{left}{operator}{right}"
        calls = [PlannedCall(tool="calculator", argument=text)]
        for _ in range(hops - 1):
            right = rng.randint(1, MAX_OPERAND)
            operator = _fitting_operator(value, right, rng)
            text = f"({text}){operator}{right}"
            value = OPERATORS[operator](value, right)
            calls.append(PlannedCall(tool="calculator", argument=f"{{previous}}{operator}{right}"))
        boxed = rng.random() < self._mix.boxed
        return Problem(
            kind="calculator", query=f"What is {text}?", answer=str(value), calls=tuple(calls), boxed=boxed
        )

    def _draw_pair(self, rng: random.Random) -> tuple[int, int]:
        while True:
            left, right = rng.randint(1, MAX_OPERAND), rng.randint(1, MAX_OPERAND)
            if is_held_out(left, right) == self._held_out:
                return left, right

    def _draw_search(self, rng: random.Random, *, chained: bool) -> Problem:
        name = rng.choice(self._entities)
        noun, value = self._facts[name]
        calls = [PlannedCall(tool="search", argument=name)]
        query = f"How many {noun} has {name}?"
        if chained:
            right = rng.randint(1, MAX_OPERAND)
            value += right
            query = f"How many {noun} has {name} plus {right}?"
            calls.append(PlannedCall(tool="calculator", argument=f"{{previous}}+{right}"))
        kind = "search_calculator" if chained else "search"
        return Problem(kind=kind, query=query, answer=str(value), calls=tuple(calls), boxed=False)


def is_held_out(left: int, right: int) -> bool:
    """Whether an operand pair belongs to the held-out half. Every digit occurs in both halves."""
    return (7 * left + 3 * right) % HELD_OUT_PART == 0


def _fitting_operator(left: int, right: int, rng: random.Random) -> str:
    fitting = [name for name, apply in OPERATORS.items() if 0 <= apply(left, right) <= MAX_VALUE]
    return rng.choice(fitting)


def load_facts(corpus: Path) -> dict[str, tuple[str, int]]:
    """Entity -> what it has and how many of it, from the bundled search corpus."""
    facts = {}
    for line in corpus.read_text(encoding="utf-8").splitlines():
        found = re.search(r"([A-Z][a-z]+) has (\d+) ([a-z]+)\.", json.loads(line)["text"])
        if found:
            facts[found[1]] = (found[3], int(found[2]))
    return facts


def load_names(corpus: Path) -> list[str]:
    """Every capitalised word of the corpus, sorted."""
    return sorted(set(re.findall(r"[A-Z][a-z]+", corpus.read_text(encoding="utf-8"))))
