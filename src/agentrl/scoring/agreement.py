"""How far two judges, or a judge and a rule, agree on the same Records."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

_RIGHT = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Counts over the Records both have scored; an answer counts as right above 0.5."""

    num_both_right: int
    num_both_wrong: int
    first_only: tuple[str, ...]  # Records that only the first one calls right
    second_only: tuple[str, ...]

    @property
    def num_records(self) -> int:
        """Records both have scored."""
        return self.num_both_right + self.num_both_wrong + len(self.first_only) + len(self.second_only)

    @property
    def rate(self) -> float:
        """Share of equal verdicts; NaN without Records."""
        return (self.num_both_right + self.num_both_wrong) / self.num_records if self.num_records else math.nan

    @property
    def kappa(self) -> float:
        """Cohen's kappa (1960): agreement beyond chance, 1 at most; NaN where chance alone would agree always."""
        if not self.num_records:
            return math.nan
        first = (self.num_both_right + len(self.first_only)) / self.num_records
        second = (self.num_both_right + len(self.second_only)) / self.num_records
        chance = first * second + (1 - first) * (1 - second)
        return (self.rate - chance) / (1 - chance) if chance < 1 else math.nan


def agreement(first: Mapping[str, float], second: Mapping[str, float]) -> Agreement:
    """Compare scores by record id; Records that only one of them has are left out."""
    shared = sorted(first.keys() & second.keys())
    verdicts = {record_id: (first[record_id] > _RIGHT, second[record_id] > _RIGHT) for record_id in shared}
    return Agreement(
        num_both_right=sum(verdict == (True, True) for verdict in verdicts.values()),
        num_both_wrong=sum(verdict == (False, False) for verdict in verdicts.values()),
        first_only=tuple(record_id for record_id, verdict in verdicts.items() if verdict == (True, False)),
        second_only=tuple(record_id for record_id, verdict in verdicts.items() if verdict == (False, True)),
    )
