"""Choices about a group that come before and after its advantages. Pure; all off unless a setting asks for them.

    scores ─ efficient_rewards ─► rewards ─► advantages ─┬─ short_successes ────────┐
                                                         ├─ surplus_context_errors ─┼─► Records that give no rows
                                                         └─ surplus_of_balance ─────┘

A Record that gives no rows stays in the baseline: its reward is as good an estimate as any, and leaving it out would
shift the advantages of the others. Random choices are seeded by the Task: whoever settles it chooses the same.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from agentrl.algo.advantages import CORRECT_SCORE
from agentrl.types import Record, StopReason

LARGEST_SHIFT = 0.1
EXTRA_WRONG = 1
EXTRA_RIGHT = 2
CONTEXT_ERRORS = frozenset({StopReason.CONTEXT_LIMIT, StopReason.MAX_TURNS})


def is_right(score: float) -> bool:
    """Whether a score counts as a correct answer."""
    return score > CORRECT_SCORE


def efficient_rewards(scores: Mapping[str, float], num_turns: Mapping[str, int]) -> dict[str, float]:
    """Rewards that prefer short correct Records and long wrong ones, by record id.

    Within the right and within the wrong half, Records are ranked by turns (ties share their mean rank), and the reward
    is the score plus a shift linear in the rank: +0.1 for the best, -0.1 for the worst, 0 in sum over the half. Equal
    turns and a half of one give no shift. A group whose scores are all equal keeps them: length alone is no signal.
    """
    rewards = dict(scores)
    if len(set(scores.values())) < 2:
        return rewards
    for half in (True, False):
        members = [record_id for record_id, score in scores.items() if is_right(score) is half]
        for record_id, shift in _rank_shifts({member: num_turns[member] for member in members}).items():
            rewards[record_id] += -shift if half else shift
    return rewards


def _rank_shifts(num_turns: Mapping[str, int]) -> dict[str, float]:
    """-0.1 for the fewest turns to +0.1 for the most, by rank; ties share their mean rank."""
    if len(num_turns) < 2:
        return dict.fromkeys(num_turns, 0.0)
    largest_centred_rank = (len(num_turns) - 1) / 2
    counts = list(num_turns.values())
    shifts = {}
    for record_id, count in num_turns.items():
        num_fewer = sum(other < count for other in counts)
        num_more = sum(other > count for other in counts)
        shifts[record_id] = LARGEST_SHIFT * (num_fewer - num_more) / 2 / largest_centred_rank
    return shifts


def short_successes(records: Sequence[Record], num_turns: Mapping[str, int], *, min_turns: int) -> set[str]:
    """Ids of correct Records with fewer than `min_turns` turns: right without doing the work."""
    return {
        record.id
        for record in records
        if record.score is not None and is_right(record.score) and num_turns[record.id] < min_turns
    }


def surplus_context_errors(records: Sequence[Record], *, keep: int, seed: str) -> set[str]:
    """Ids of the Records that stopped at the context or turn limit, but for a random `keep` of them."""
    stopped = [record.id for record in records if record.stop_reason in CONTEXT_ERRORS]
    return set(stopped) - _sample(stopped, count=keep, seed=f"{seed}/context")


def surplus_of_balance(scores: Mapping[str, float], *, excluded: AbstractSet[str], seed: str) -> set[str]:
    """Ids beyond a random m + 1 wrong and m + 2 right Records, m being the smaller of both counts.

    `scores` has only scored Records, so a failure is neither; `excluded` ones are not counted and not returned.
    """
    candidates = {record_id: score for record_id, score in scores.items() if record_id not in excluded}
    right = [record_id for record_id, score in candidates.items() if is_right(score)]
    wrong = [record_id for record_id, score in candidates.items() if not is_right(score)]
    smaller = min(len(right), len(wrong))
    kept = _sample(wrong, count=smaller + EXTRA_WRONG, seed=f"{seed}/wrong")
    kept |= _sample(right, count=smaller + EXTRA_RIGHT, seed=f"{seed}/right")
    return set(candidates) - kept


def _sample(ids: Sequence[str], *, count: int, seed: str) -> set[str]:
    """A random `count` of the ids, whatever their order; all if there are fewer."""
    return set(random.Random(seed).sample(sorted(ids), min(count, len(ids))))
