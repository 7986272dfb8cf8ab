"""Which settled groups a step may train: each up to `max_trained_count` times, and never beyond the staleness bound.

How often a group was trained is read from the ledger's entries, never from a counter. Only the last `max_staleness`
steps can have trained a group that is still fresh enough, so they are the whole history.

    settled, never trained ─────────────────────────► first, oldest first
    settled, trained fewer times than allowed,
       last `retrained_interval` or more steps ago ─► then, least often trained first
    trained, and too old to be trained again ───────► retired: consumed, without being counted as stale
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentrl.types import GroupOutcome, SettledGroup, TrainStep

RETIRED = "retired"


def is_stale(group: SettledGroup, *, policy_version: int, max_staleness: int) -> bool:
    """Whether any token of the group is older than the bound (L2). Rows without sampled tokens never are."""
    oldest = policy_version - max_staleness
    return any(0 <= row.min_policy_version < oldest for row in group.sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """The rule for one step. `history`: the ledger's entries of the `max_staleness` steps before it."""

    step: int
    max_trained_count: int
    retrained_interval: int
    max_staleness: int
    history: Sequence[TrainStep]

    @property
    def steps_of_groups(self) -> Mapping[str, list[int]]:
        """The steps that trained each group, of those in the history."""
        trained: dict[str, list[int]] = {}
        for entry in self.history:
            for task_id in entry.task_ids:
                if task_id not in entry.dropped:
                    trained.setdefault(task_id, []).append(entry.step)
        return trained

    def num_retrained(self, groups: Sequence[SettledGroup]) -> int:
        """How many of the groups were trained before."""
        trained = self.steps_of_groups
        return sum(group.settlement.task_id in trained for group in groups)

    def usable(self, groups: Sequence[SettledGroup]) -> list[SettledGroup]:
        """The groups this step may train or drop, in the order to take them; `groups` are oldest first."""
        trained = self.steps_of_groups
        usable = [group for group in groups if self._may_be_trained(trained.get(group.settlement.task_id, []))]
        return sorted(usable, key=lambda group: len(trained.get(group.settlement.task_id, [])))  # stable: oldest first

    def _may_be_trained(self, steps: Sequence[int]) -> bool:
        is_due = not steps or self.step - steps[-1] >= self.retrained_interval
        return is_due and len(steps) < self.max_trained_count

    def retained(self, groups: Sequence[SettledGroup]) -> list[str]:
        """Of the groups this step takes, those that may be trained once more: they are not consumed with it."""
        trained = self.steps_of_groups
        return [
            group.settlement.task_id
            for group in groups
            if group.settlement.outcome is GroupOutcome.TRAINABLE
            and len(trained.get(group.settlement.task_id, [])) + 1 < self.max_trained_count
            and not self._is_stale_at(group, step=self.step + self.retrained_interval)
        ]

    def retired(self, groups: Sequence[SettledGroup], *, step: int) -> list[str]:
        """Groups that were trained before and are too old for `step`: they did their work."""
        trained = self.steps_of_groups
        return [
            group.settlement.task_id
            for group in groups
            if group.settlement.task_id in trained and self._is_stale_at(group, step=step)
        ]

    def _is_stale_at(self, group: SettledGroup, *, step: int) -> bool:
        return is_stale(group, policy_version=step - 1, max_staleness=self.max_staleness)
