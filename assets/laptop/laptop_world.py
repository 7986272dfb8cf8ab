"""The little world the laptop model lives in: problems whose answer needs one to three tool calls.

    What is 37*24?                     calculator("37*24") -> 888
    What is (37+24)*3?                 calculator("37+24") -> 61, calculator("61*3") -> 183
    How many bridges has Emba?         search("Emba") -> "Emba is a city ... Emba has 42 bridges." -> 42
    How many bridges has Emba plus 7?  search("Emba"), calculator("42+7") -> 49

The world has two halves that share no innermost operand pair and no entity: one to train on, one held out. Everything
follows from the random generator that is passed in.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentrl.tools.servers.calculator import evaluate
from agentrl.tools.servers.search import BUNDLED_CORPUS, SearchIndex, load_corpus

MAX_OPERAND = 99
MAX_VALUE = 999  # of results: a number is at most two tokens, see laptop_tokenizer
OPERATORS = ("+", "-", "*")
HELD_OUT_PART = 5  # one in so many operand pairs and entities is held out
BOXED_PROMPT = "Put the answer in a box."
NUMBER = re.compile(r"\d+")

_COUNT = re.compile(r"([A-Z][a-z]+) has (\d+) ([a-z]+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCall:
    """One tool call of the shortest solution. `{previous}` in the argument is the number the call before gave."""

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
    source: str  # "37,24" or the entity: what decides whether the problem is held out
    is_boxed: bool  # asks for \boxed{...} instead of <answer>...</answer>


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """How often which problem is drawn."""

    search: float  # share of problems
    search_calculator: float  # share of problems
    boxed: float  # share of calculator problems
    operations: tuple[float, float, float]  # weights of calculator problems with one, two and three operations


TASK_MIX = Mix(search=0.06, search_calculator=0.06, boxed=0.1, operations=(0.5, 0.38, 0.12))


class Tools:
    """The bundled tool servers without the servers: the same functions, for demonstrations and for known facts."""

    def __init__(self) -> None:
        documents = load_corpus(BUNDLED_CORPUS)
        self._index = SearchIndex(documents)
        self._texts = [document.text for document in documents]

    def call(self, tool: str, argument: str) -> str:
        """What the server would answer. Raises what its function raises."""
        return evaluate(argument) if tool == "calculator" else self._index.search(argument, top_k=1, max_chars=4000)

    def counts(self) -> dict[str, tuple[str, int]]:
        """Entity -> (what it has, how many), of every entity that has something to count."""
        found = [match for text in self._texts if (match := _COUNT.search(text))]
        return {match[1]: (match[3], int(match[2])) for match in found}

    def names(self) -> list[str]:
        """Every name in the corpus, sorted."""
        return sorted({name for text in self._texts for name in re.findall(r"[A-Z][a-z]+", text)})


class World:
    """Draws problems from one half of the world."""

    def __init__(self, counts: Mapping[str, tuple[str, int]], *, is_held_out: bool, mix: Mix) -> None:
        self._counts = counts
        self._is_held_out = is_held_out
        self._mix = mix
        self._entities = [
            name for index, name in enumerate(sorted(counts)) if (index % HELD_OUT_PART == 0) == is_held_out
        ]

    def draw(self, rng: random.Random) -> Problem:
        """One problem."""
        share = rng.random()
        if share < self._mix.search:
            return self._draw_search(rng)
        if share < self._mix.search + self._mix.search_calculator:
            return self._draw_search_calculator(rng)
        return self._draw_calculator(rng)

    def _draw_calculator(self, rng: random.Random) -> Problem:
        left, right = self._draw_pair(rng)
        text, value = _apply_one(str(left), left, right, rng=rng)
        calls = [PlannedCall(tool="calculator", argument=text)]
        for _ in range(rng.choices((0, 1, 2), weights=self._mix.operations)[0]):
            operand = rng.randint(1, MAX_OPERAND)
            text, value = _apply_one(f"({text})", value, operand, rng=rng)
            calls.append(PlannedCall(tool="calculator", argument="{previous}" + text.rpartition(")")[2]))
        return Problem(
            kind="calculator",
            query=f"What is {text}?",
            answer=str(value),
            calls=tuple(calls),
            source=f"{left},{right}",
            is_boxed=rng.random() < self._mix.boxed,
        )

    def _draw_pair(self, rng: random.Random) -> tuple[int, int]:
        while True:
            left, right = rng.randint(1, MAX_OPERAND), rng.randint(1, MAX_OPERAND)
            if is_pair_held_out(left, right) == self._is_held_out:
                return left, right

    def _draw_search(self, rng: random.Random) -> Problem:
        name = rng.choice(self._entities)
        noun, count = self._counts[name]
        return Problem(
            kind="search",
            query=f"How many {noun} has {name}?",
            answer=str(count),
            calls=(PlannedCall(tool="search", argument=name),),
            source=name,
            is_boxed=False,
        )

    def _draw_search_calculator(self, rng: random.Random) -> Problem:
        name = rng.choice(self._entities)
        noun, count = self._counts[name]
        operand = rng.randint(1, MAX_OPERAND)
        calls = (
            PlannedCall(tool="search", argument=name),
            PlannedCall(tool="calculator", argument=f"{{previous}}+{operand}"),
        )
        return Problem(
            kind="search_calculator",
            query=f"How many {noun} has {name} plus {operand}?",
            answer=str(count + operand),
            calls=calls,
            source=name,
            is_boxed=False,
        )


def is_pair_held_out(left: int, right: int) -> bool:
    """Whether an operand pair belongs to the held-out half. Every operand occurs in both halves, on either side."""
    return (7 * left + 3 * right) % HELD_OUT_PART == 0


def draw_distinct(world: World, count: int, *, rng: random.Random) -> Sequence[Problem]:
    """Problems with `count` different questions."""
    problems: dict[str, Problem] = {}
    while len(problems) < count:
        problem = world.draw(rng)
        problems.setdefault(problem.query, problem)
    return list(problems.values())


def _apply_one(text: str, left: int, right: int, *, rng: random.Random) -> tuple[str, int]:
    """`text` with one more operation whose value is in bounds, and that value."""
    values = {operator: int(evaluate(f"{left}{operator}{right}")) for operator in OPERATORS}
    operator = rng.choice([operator for operator, value in values.items() if 0 <= value <= MAX_VALUE])
    return f"{text}{operator}{right}", values[operator]
