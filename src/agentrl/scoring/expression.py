"""The text form of a scorer: one name, or a weighted sum of names.

gaia                                   one scorer
(gaia or agentcpm)                     the rule first; the judge where the rule gives less than 1
0.9*gaia + 0.1*format                  a weighted sum
0.9*gaia + 0.1*format if gaia          the second term counts only where gaia gives its full 1

sum    = term { "+" term }
term   = [ number "*" ] choice [ "if" choice ]
choice = name | "(" name { "or" name } ")"
"""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import lru_cache

from agentrl.errors import ConfigError

_TOKEN = re.compile(r"\s*(?:(?P<number>\d+\.?\d*|\.\d+)|(?P<name>[A-Za-z_][\w-]*)|(?P<sign>[*+()]))")
_KEYWORDS = frozenset({"if", "or"})
FULL_SCORE = 1.0

NameScore = Callable[[str], Awaitable[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Names tried in order until one gives the full score."""

    names: tuple[str, ...]

    async def evaluate(self, score: NameScore) -> float:
        """The first full score, else the best."""
        best = -math.inf
        for name in self.names:
            best = max(best, await score(name))
            if best >= FULL_SCORE:
                break
        return best


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """`weight * value`, and nothing unless `gate` gives its full score."""

    weight: float
    value: Choice
    gate: Choice | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerExpression:
    """A parsed scorer."""

    terms: tuple[Term, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Every scorer it needs, each once."""
        choices = [choice for term in self.terms for choice in (term.value, term.gate) if choice is not None]
        return tuple(dict.fromkeys(name for choice in choices for name in choice.names))

    async def evaluate(self, score: NameScore) -> float:
        """The sum. Each name is scored at most once; what `score` raises passes through."""
        known: dict[str, float] = {}

        async def once(name: str) -> float:
            if name not in known:
                known[name] = await score(name)
            return known[name]

        total = 0.0
        for term in self.terms:
            if term.gate is None or await term.gate.evaluate(once) >= FULL_SCORE:
                total += term.weight * await term.value.evaluate(once)
        return total


@lru_cache(maxsize=256)
def parse_expression(text: str) -> ScorerExpression:
    """The scorer that `text` writes. Raises ConfigError with the place that cannot be read."""
    return _Parser(text).sum()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[str] = []
        position = 0
        while text[position:].strip():
            match = _TOKEN.match(text, position)
            if match is None:
                raise self._fault(f"{text[position:].strip()[:20]!r} is no part of one")
            self._tokens.append(match.group().strip())
            position = match.end()

    def sum(self) -> ScorerExpression:
        terms = [self._term()]
        while self._take("+"):
            terms.append(self._term())
        if self._tokens:
            raise self._fault(f"{self._tokens[0]!r} comes too early")
        return ScorerExpression(terms=tuple(terms))

    def _term(self) -> Term:
        weight = 1.0
        if self._tokens and self._tokens[0][0] in "0123456789.":
            weight = float(self._tokens.pop(0))
            if weight <= 0:
                raise self._fault("a weight must be above 0")
            if not self._take("*"):
                raise self._fault("a weight is followed by * and a scorer")
        value = self._choice()
        return Term(weight=weight, value=value, gate=self._choice() if self._take("if") else None)

    def _choice(self) -> Choice:
        if not self._take("("):
            return Choice(names=(self._name(),))
        names = [self._name()]
        while self._take("or"):
            names.append(self._name())
        if not self._take(")"):
            raise self._fault("a ) is missing")
        return Choice(names=tuple(names))

    def _name(self) -> str:
        if not self._tokens or self._tokens[0] in _KEYWORDS or not re.match(r"[A-Za-z_]", self._tokens[0]):
            found = repr(self._tokens[0]) if self._tokens else "its end"
            raise self._fault(f"{found} stands where a scorer's name should be")
        return self._tokens.pop(0)

    def _take(self, token: str) -> bool:
        if self._tokens and self._tokens[0] == token:
            self._tokens.pop(0)
            return True
        return False

    def _fault(self, reason: str) -> ConfigError:
        return ConfigError(
            f'scorer "{self._text[:80]}" cannot be read: {reason}; write a name, or for example '
            '"0.9*gaia + 0.1*format if gaia"'
        )
