"""Whether a completion is caught in a loop: the same run of tokens again and again until it ends. Pure.

token ids    ... 7 | 4 9 2 | 4 9 2 | 4 9 2 | 4 9          run (4 9 2), begun four times: 3 whole repeats
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_RUN_TOKENS = 64
SHORTEST_LOOP_TOKENS = 32  # less may be a row of zeros or a table border


def loop_repeats(token_ids: Sequence[int]) -> int:
    """How often the end of a completion repeats one run of up to 64 tokens; 0 where that covers under 32 tokens."""
    most = 0
    for run in range(1, min(LONGEST_RUN_TOKENS, len(token_ids) // 2) + 1):
        covered = run + _same_as_before(token_ids, distance=run)
        if covered >= max(2 * run, SHORTEST_LOOP_TOKENS):
            most = max(most, covered // run)
    return most


def _same_as_before(token_ids: Sequence[int], *, distance: int) -> int:
    """Length of the longest end in which every token equals the one `distance` before it."""
    position = len(token_ids) - 1
    while position >= distance and token_ids[position] == token_ids[position - distance]:
        position -= 1
    return len(token_ids) - 1 - position
