"""The token trie of training rows: every prefix that rows have in common exists once.

    row a   P P P x x T y             tokens_N    P P P x x T y z z           nodes, depth first
    row b   P P P z z                 depths_N    0 1 2 3 4 5 6 3 4           position of the token in its row

    segments          [0, 3)  P P P        serves [0, 9)      a segment is a chain without branches; its descendants
                        ├── [3, 7)         serves [3, 7)      lie right behind it, so that "everything below it" is
                        └── [7, 9)         serves [7, 9)      one range of nodes

Rows are equal where their token ids are: prompts and tool results, and also sampled tokens that two generations have
in common. That is exact: the hidden state before a token depends on the ids before it alone, and every row keeps a path
of its own, so both rows train the token with their own mask, log-prob, version and advantage. Pure: no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from agentrl.types import DBRecordData, Int32Array, SequenceSummary

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Nodes [start, end), a chain at depths `depth`, ...; its descendants are the nodes [end, reach)."""

    start: int
    end: int
    reach: int
    depth: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenTrie:
    """N nodes in depth-first order. `paths[i][t]` is the node of token t of row i."""

    token_ids_N: Int32Array
    depths_N: Int32Array
    segments: tuple[Segment, ...]  # by start
    paths: tuple[Int64Array, ...]

    @property
    def num_tokens(self) -> int:
        """N: the fewest tokens a forward pass over these rows can have."""
        return int(self.token_ids_N.size)


def build_trie(rows: Sequence[Int32Array]) -> TokenTrie:
    """The trie of rows of non-negative token ids; an empty row has an empty path. Forests are tries with many roots."""
    keys = [row.astype(">u4").tobytes() for row in rows]  # big-endian bytes sort like the ids
    order = sorted(range(len(rows)), key=keys.__getitem__)
    paths: list[Int64Array] = [np.zeros(0, dtype=np.int64)] * len(rows)
    new_tokens, new_depths = [], []
    growing = _GrowingSegments()
    before = np.zeros(0, dtype=np.int32)
    path = np.zeros(0, dtype=np.int64)
    for index in order:
        row = rows[index]
        shared = common_prefix(before, row)
        start = growing.add(num_shared=shared, length=row.size)
        path = np.concatenate([path[:shared], np.arange(start, start + row.size - shared, dtype=np.int64)])
        paths[index] = path
        new_tokens.append(row[shared:])
        new_depths.append(np.arange(shared, row.size, dtype=np.int32))
        before = row
    empty = np.zeros(0, dtype=np.int32)
    return TokenTrie(
        token_ids_N=np.concatenate([empty, *new_tokens]),
        depths_N=np.concatenate([empty, *new_depths]),
        segments=growing.finish(),
        paths=tuple(paths),
    )


class _GrowingSegments:
    """Segments while rows come in lexicographic order: the open ones are the path of the row that came last."""

    def __init__(self) -> None:
        self._num_nodes = 0
        self._open: list[Segment] = []
        self._closed: list[Segment] = []

    def add(self, *, num_shared: int, length: int) -> int:
        """Open the new part of a row that leaves the row before it after `num_shared` tokens; its first node."""
        while self._open and self._open[-1].depth >= num_shared:
            self._close(self._open.pop())
        if self._open:
            self._cut(at_depth=num_shared)
        start = self._num_nodes
        if length > num_shared:
            self._num_nodes += length - num_shared
            self._open.append(Segment(start=start, end=self._num_nodes, reach=start, depth=num_shared))
        return start

    def finish(self) -> tuple[Segment, ...]:
        """All segments, by start."""
        while self._open:
            self._close(self._open.pop())
        return tuple(sorted(self._closed, key=lambda segment: segment.start))

    def _cut(self, *, at_depth: int) -> None:
        """Where a row leaves the middle of a segment, the rest of the segment becomes a child of its own."""
        top = self._open[-1]
        middle = top.start + at_depth - top.depth
        if middle < top.end:
            self._close(replace(top, start=middle, depth=at_depth))
            self._open[-1] = replace(top, end=middle)

    def _close(self, segment: Segment) -> None:
        self._closed.append(replace(segment, reach=self._num_nodes))


def common_prefix(first: Int32Array, second: Int32Array) -> int:
    """How many leading tokens two rows have in common."""
    length = min(first.size, second.size)
    differ = np.flatnonzero(first[:length] != second[:length])
    return int(differ[0]) if differ.size else int(length)


def summarise_group(rows: Sequence[DBRecordData]) -> tuple[SequenceSummary, ...]:
    """The planner's view of the rows of one Task, in their order, with what each shares with the row before it."""
    summaries = []
    before = np.zeros(0, dtype=np.int32)
    for row in rows:
        summaries.append(replace(row.summary, num_shared_tokens=common_prefix(before, row.token_ids)))
        before = row.token_ids
    return tuple(summaries)


def summarise_groups(rows: Iterable[DBRecordData]) -> list[tuple[SequenceSummary, ...]]:
    """The planner's view of rows of many Tasks: those of one Task together, each Task where its first row is."""
    by_task: dict[str, list[DBRecordData]] = {}
    for row in rows:
        by_task.setdefault(row.task_id, []).append(row)
    return [summarise_group(group) for group in by_task.values()]


def input_tokens(row: DBRecordData) -> Int32Array:
    """The tokens a forward pass over the row needs: nothing from the last trained token on; at least one."""
    trained = np.flatnonzero(row.loss_mask)
    return row.token_ids[: int(trained[-1]) if trained.size else 1]


def model_calls(row: DBRecordData) -> list[tuple[int, int]]:
    """[start, end) of every run of trained tokens: what one model call each has sampled."""
    edges = np.diff(row.loss_mask.astype(np.int8), prepend=0, append=0)
    starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    return list(zip(starts.tolist(), ends.tolist(), strict=True))
