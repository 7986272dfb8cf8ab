from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.inference.lanes import CacheCopy, LaneTable

CAPACITY = 12


@dataclass
class ShadowCache:
    """What the key-value cache would hold: a token list per slot, moved by the copies the table asks for."""

    slots: list[list[int]] = field(default_factory=lambda: [[] for _ in range(10)])

    def copy(self, copies: tuple[CacheCopy, ...]) -> None:
        for move in copies:
            source = self.slots[move.source]
            assert len(source) >= move.num_tokens, "copies what was never computed"
            target = self.slots[move.target]
            self.slots[move.target] = source[: move.num_tokens] + target[move.num_tokens :]


def table(num_lanes: int = 3, num_archived: int = 2) -> LaneTable:
    return LaneTable(num_lanes=num_lanes, num_archived=num_archived, capacity=CAPACITY)


def run(lanes: LaneTable, ids: list[int]) -> int:
    """One sequence from placement to release. Returns how many tokens it reused."""
    placement = lanes.place(ids, key="", limit=len(ids) - 1)
    lanes.note_prefilled(placement.lane, ids)
    lanes.release(placement.lane, ids)
    return placement.num_cached


def test_a_continued_conversation_takes_its_own_lane_over_without_a_copy() -> None:
    lanes = table()
    run(lanes, [1, 2, 3])
    placement = lanes.place([1, 2, 3, 4, 5], key="", limit=4)
    assert (placement.lane, placement.num_cached, placement.copies) == (0, 3, ())


def test_the_last_token_is_never_reused() -> None:
    lanes = table()
    run(lanes, [1, 2, 3])
    assert lanes.place([1, 2, 3], key="", limit=2).num_cached == 2


def test_keys_separate_prefixes() -> None:
    lanes = table()
    run(lanes, [1, 2, 3])
    assert lanes.place([1, 2, 3, 4], key="other", limit=3).num_cached == 0


def test_a_running_prompt_is_copied_by_the_rest_of_its_group() -> None:
    lanes = table()
    first = lanes.place([1, 2, 3, 4], key="", limit=3)
    assert lanes.num_coming([1, 2, 3, 4], key="", limit=3) == 3
    assert lanes.num_reusable([1, 2, 3, 4], key="", limit=3) == 0
    lanes.note_prefilled(first.lane, [1, 2, 3, 4])
    second = lanes.place([1, 2, 3, 4], key="", limit=3)
    assert second.copies == (CacheCopy(source=first.lane, target=second.lane, num_tokens=3),)


def test_a_prefix_that_must_leave_its_lane_is_archived_and_found_again() -> None:
    lanes = table(num_lanes=1, num_archived=1)
    run(lanes, [1, 2, 3, 4])
    placement = lanes.place([9, 8, 7], key="", limit=2)
    assert placement.copies == (CacheCopy(source=0, target=1, num_tokens=4),)
    lanes.release(placement.lane, [9, 8, 7])
    assert lanes.num_reusable([1, 2, 3, 4, 5], key="", limit=4) == 4


def test_new_weights_forget_everything() -> None:
    lanes = table()
    run(lanes, [1, 2, 3])
    lanes.clear()
    assert lanes.num_reusable([1, 2, 3, 4], key="", limit=3) == 0


def test_sparse_lanes_are_moved_together() -> None:
    lanes = table(num_lanes=8, num_archived=0)
    placed = [lanes.place([index, index], key="", limit=1).lane for index in range(8)]
    for lane in placed[:7]:
        lanes.release(lane, [lane])
    copies = lanes.compact({7: 5})
    assert copies[-1] == CacheCopy(source=7, target=0, num_tokens=5)
    assert lanes.span == 1


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 2), min_size=1, max_size=CAPACITY - 3),
            st.integers(0, 3),
            st.booleans(),
            st.booleans(),
        ),
        max_size=40,
    ),
    st.integers(0, 3),
)
def test_whatever_is_reused_was_computed_for_exactly_these_tokens(
    steps: list[tuple[list[int], int, bool, bool]], num_archived: int
) -> None:
    lanes = table(num_lanes=6, num_archived=num_archived)
    cache = ShadowCache()
    running: dict[int, list[int]] = {}
    for ids, num_sampled, release_first, compact in steps:
        if running and (release_first or not lanes.num_free):
            lane = next(iter(running))
            lanes.release(lane, running.pop(lane))
        placement = lanes.place(ids, key="", limit=len(ids) - 1)
        assert placement.lane not in running
        cache.copy(placement.copies)
        assert cache.slots[placement.lane][: placement.num_cached] == ids[: placement.num_cached]
        lanes.note_prefilled(placement.lane, ids)
        running[placement.lane] = ids + [0] * num_sampled
        cache.slots[placement.lane] = list(running[placement.lane])
        if compact and (copies := lanes.compact({lane: len(held) for lane, held in running.items()})):
            cache.copy(copies)
            running[copies[-1].target] = running.pop(copies[-1].source)
        for lane, held in running.items():
            assert cache.slots[lane][: len(held)] == held
