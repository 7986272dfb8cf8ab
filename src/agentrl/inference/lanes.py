"""Which sequence sits in which lane of the key-value cache, and which tokens can be reused from where. Pure (NumPy).

    index   0 .. num_lanes-1        lanes: decoded together, so they are kept dense from 0
            num_lanes .. num_slots  archive: prefixes of finished sequences that had to leave their lane

A finished sequence leaves its tokens behind. A new one that starts with them takes the lane over as it is, or copies
the common prefix from wherever it is. Only the newest policy's values may be reused: a weight update clears everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_SPARSE_FROM = 4  # lanes; below, compacting saves nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCopy:
    """Copy keys and values of the first `num_tokens` positions of slot `source` to slot `target`."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Lane of a new sequence, how many leading tokens are there once `copies` are done in order."""

    lane: int
    num_cached: int
    copies: tuple[CacheCopy, ...]


class LaneTable:
    """Book-keeping for `num_lanes` decoding lanes and `num_archived` archive slots of `capacity` tokens each."""

    def __init__(self, *, num_lanes: int, num_archived: int, capacity: int) -> None:
        self.num_lanes = num_lanes
        self.num_slots = num_lanes + num_archived
        self._tokens = np.full((self.num_slots, capacity), -1, dtype=np.int32)
        self._claimed = np.full((self.num_slots, capacity), -1, dtype=np.int32)
        self._num_valid = np.zeros(self.num_slots, dtype=np.int64)
        self._keys = [""] * self.num_slots
        self._busy = np.zeros(self.num_slots, dtype=bool)
        self._used_at = np.zeros(self.num_slots, dtype=np.int64)
        self._clock = 0

    @property
    def num_free(self) -> int:
        """Lanes that may take a sequence."""
        return int(self.num_lanes - self._busy[: self.num_lanes].sum())

    @property
    def span(self) -> int:
        """One past the highest busy lane: the batch a decode step computes."""
        busy = np.flatnonzero(self._busy)
        return int(busy[-1]) + 1 if busy.size else 0

    def num_reusable(self, token_ids: Sequence[int], *, key: str, limit: int) -> int:
        """Longest prefix (at most `limit`) that some slot holds."""
        matches = self._matches(np.asarray(token_ids, dtype=np.int32), key=key, limit=limit)
        return int(matches.max(initial=0))

    def num_coming(self, token_ids: Sequence[int], *, key: str, limit: int) -> int:
        """Longest prefix that a lane will hold once its prefill, not done yet, is: worth waiting for."""
        ids = np.asarray(token_ids, dtype=np.int32)
        return int(self._matches(ids, key=key, limit=limit, table=self._claimed).max(initial=0))

    def place(self, token_ids: Sequence[int], *, key: str, limit: int) -> Placement:
        """Take a free lane for a sequence; at most `limit` of its tokens may be reused. Needs `num_free` > 0."""
        ids = np.asarray(token_ids, dtype=np.int32)
        matches = self._matches(ids, key=key, limit=limit)
        best = int(matches.argmax())
        num_cached = int(matches[best])
        copies: list[CacheCopy] = []
        if num_cached and best < self.num_lanes and not self._busy[best] and num_cached >= self._num_valid[best]:
            lane = best  # its whole content continues here: nothing is lost by taking it over
        else:
            lane = self._victim_lane()
            archived = self._archive(lane, keep=best)
            if archived is not None:
                copies.append(archived)
            if num_cached and best != lane:
                copies.append(CacheCopy(source=best, target=lane, num_tokens=num_cached))
        self._write(lane, ids[:num_cached])
        self._claimed[lane, : ids.size] = ids
        self._keys[lane] = key
        self._busy[lane] = True
        return Placement(lane=lane, num_cached=num_cached, copies=tuple(copies))

    def note_prefilled(self, lane: int, token_ids: Sequence[int]) -> None:
        """The cache of a busy lane now holds these tokens: others may copy them while it runs."""
        self._write(lane, np.asarray(token_ids, dtype=np.int32))
        self._claimed[lane] = -1

    def release(self, lane: int, token_ids: Sequence[int]) -> None:
        """The sequence is over; `token_ids` are those whose keys and values are in the lane, kept for reuse."""
        self._write(lane, np.asarray(token_ids, dtype=np.int32))
        self._claimed[lane] = -1
        self._busy[lane] = False

    def compact(self, lengths: Mapping[int, int]) -> tuple[CacheCopy, ...]:
        """When the busy lanes are sparse, move the highest one down: the last copy returned, empty where none is due.

        `lengths` has the positions filled of each busy lane.
        """
        num_busy, span = int(self._busy.sum()), self.span
        if span <= _SPARSE_FROM or num_busy * 3 > span * 2:
            return ()
        source = span - 1
        target = int(np.flatnonzero(~self._busy[:source])[0])
        archived = self._archive(target, keep=source)
        self._write(target, self._tokens[source, : self._num_valid[source]].copy())
        self._claimed[target], self._keys[target] = self._claimed[source], self._keys[source]
        self._claimed[source] = -1
        self._busy[target], self._busy[source] = True, False
        move = CacheCopy(source=source, target=target, num_tokens=lengths[source])
        return (move,) if archived is None else (archived, move)

    def clear(self) -> None:
        """Forget every reusable prefix (new weights). Busy lanes stay busy."""
        self._num_valid[:] = 0
        self._tokens[:] = -1
        self._claimed[:] = -1

    def _matches(
        self, ids: npt.NDArray[np.int32], *, key: str, limit: int, table: npt.NDArray[np.int32] | None = None
    ) -> npt.NDArray[np.int64]:
        table = self._tokens if table is None else table
        width = min(ids.size, limit)
        if width <= 0:
            return np.zeros(self.num_slots, dtype=np.int64)
        differs = np.ones((self.num_slots, width + 1), dtype=bool)
        np.not_equal(table[:, :width], ids[None, :width], out=differs[:, :width])
        matches: npt.NDArray[np.int64] = differs.argmax(axis=1)
        matches[[other != key for other in self._keys]] = 0
        return matches

    def _victim_lane(self) -> int:
        """A free lane: inside the current span first, empty before used, then the one unused for longest."""
        free = np.flatnonzero(~self._busy[: self.num_lanes])
        span = self.span
        rank = [(lane >= span, self._num_valid[lane] > 0, self._used_at[lane], lane) for lane in free.tolist()]
        return int(min(rank)[-1])

    def _archive(self, lane: int, *, keep: int) -> CacheCopy | None:
        """Save what a lane holds before it is overwritten, in the archive slot unused for longest (but not `keep`)."""
        num_valid = int(self._num_valid[lane])
        slots = [slot for slot in range(self.num_lanes, self.num_slots) if slot != keep]
        if not num_valid or not slots:
            return None
        held = self._matches(self._tokens[lane, :num_valid], key=self._keys[lane], limit=num_valid)
        held[lane] = 0
        if held.max(initial=0) >= num_valid:
            return None  # another slot holds all of it
        target = min(slots, key=lambda slot: (self._num_valid[slot] > 0, self._used_at[slot]))
        self._write(target, self._tokens[lane, :num_valid])
        self._keys[target] = self._keys[lane]
        self._used_at[target] = self._used_at[lane]
        return CacheCopy(source=lane, target=target, num_tokens=num_valid)

    def _write(self, slot: int, ids: npt.NDArray[np.int32]) -> None:
        self._tokens[slot, : ids.size] = ids
        self._tokens[slot, ids.size :] = -1
        self._num_valid[slot] = ids.size
        self._clock += 1
        self._used_at[slot] = self._clock
