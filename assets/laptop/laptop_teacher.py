r"""The flawed teacher whose demonstrations the laptop model learns to imitate before reinforcement learning.

The start is weak because its teacher decides badly, never because it copies badly: it gives up without a tool call,
stops before the last call, applies the last operation first, or answers in the wrong form. Everything it copies is
right. So every behaviour a good policy needs is there, with a small probability, and reward can find it.

Two kinds of rows: demonstrations of problems (of the training half only), and drills, where the assistant repeats the
user's words: the cheapest way to teach a two-layer model to copy. Drills hold every name, so held-out ones can be
copied too; what is known about them appears nowhere.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from laptop_world import BOXED_PROMPT, MAX_OPERAND, NUMBER, OPERATORS, Mix, PlannedCall, Problem, Tools, World

DEMONSTRATION_MIX = Mix(search=0.08, search_calculator=0.08, boxed=0.2, operations=(0.2, 0.4, 0.4))
DRILL_SHARE = 0.3
DRILL_LENGTH = 8
LARGEST_DRILLED = 9999
ARGUMENT_NAMES = {"calculator": "expression", "search": "query"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Flaws:
    """Probabilities of the teacher's bad decisions."""

    gives_up: float = 0.5  # answers "unknown" without a call
    stops_early: float = 0.3  # after each call but the last: answers with what it has
    starts_wrong: float = 0.15  # problems of several operations: applies the second one to the first operands
    forgets_box: float = 0.4  # writes <answer> where a box was asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """A conversation to imitate: what the user asks, and the assistant's completions with the tool results between."""

    system_prompt: str | None
    query: str
    completions: tuple[str, ...]  # without end of turn
    results: tuple[tuple[str, str], ...]  # (tool, result) after every completion but the last
    is_drill: bool = False
    is_correct: bool = True

    @property
    def replies(self) -> tuple[tuple[dict[str, str], ...], ...]:
        """The messages between one completion and the next."""
        return tuple(({"role": "tool", "name": tool, "content": result},) for tool, result in self.results)


class Teacher:
    """Draws lessons. Same generator state, same lessons."""

    def __init__(self, tools: Tools, *, rng: random.Random, flaws: Flaws | None = None) -> None:
        self._tools = tools
        self._names = tools.names()
        self._world = World(tools.counts(), is_held_out=False, mix=DEMONSTRATION_MIX)
        self._rng = rng
        self._flaws = flaws or Flaws()

    def lessons(self, count: int) -> Iterator[Lesson]:
        """`count` lessons, drills among them."""
        for _ in range(count):
            yield self._drill() if self._happens(DRILL_SHARE) else self.solve(self._world.draw(self._rng))

    def solve(self, problem: Problem) -> Lesson:
        """The teacher's attempt at a problem."""
        writes_box = problem.is_boxed and not self._happens(self._flaws.forgets_box)
        calls = self._decide_calls(problem)
        number = "unknown"
        completions: list[str] = []
        results: list[tuple[str, str]] = []
        for call in calls:
            argument = call.argument_after(number)
            completions.append(_call_text(call.tool, argument))
            result = self._tools.call(call.tool, argument)
            results.append((call.tool, result))
            number = result if call.tool == "calculator" else NUMBER.findall(result)[-1]
        completions.append(f"\\boxed{{{number}}}" if writes_box else f"<answer>{number}</answer>")
        return Lesson(
            system_prompt=BOXED_PROMPT if problem.is_boxed else None,
            query=problem.query,
            completions=tuple(completions),
            results=tuple(results),
            is_correct=number == problem.answer and writes_box == problem.is_boxed,
        )

    def _decide_calls(self, problem: Problem) -> Sequence[PlannedCall]:
        if self._happens(self._flaws.gives_up):
            return ()
        first, *rest = problem.calls
        if rest and problem.kind == "calculator" and self._happens(self._flaws.starts_wrong):
            second_operand = NUMBER.findall(first.argument)[-1]
            return (PlannedCall(tool="calculator", argument=rest[0].argument_after(second_operand)),)
        kept = [first]
        for call in rest:
            if self._happens(self._flaws.stops_early):
                break
            kept.append(call)
        return kept

    def _drill(self) -> Lesson:
        words = [word for _ in range(DRILL_LENGTH) for word in (self._drill_word(), self._rng.choice(OPERATORS))]
        text = "".join(words)
        return Lesson(system_prompt=None, query=text, completions=(text,), results=(), is_drill=True)

    def _drill_word(self) -> str:
        """A name, an operand, or a number as long as results are."""
        kind = self._rng.choices(("name", "operand", "result", "longer"), weights=(30, 30, 20, 20))[0]
        if kind == "name":
            return self._rng.choice(self._names)
        low, high = {"operand": (1, MAX_OPERAND), "result": (100, 999), "longer": (100, LARGEST_DRILLED)}[kind]
        return str(self._rng.randint(low, high))

    def _happens(self, probability: float) -> bool:
        return self._rng.random() < probability


def _call_text(tool: str, argument: str) -> str:
    call = {"name": tool, "arguments": {ARGUMENT_NAMES[tool]: argument}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
