"""Static key-value cache of the embedded engine, behind transformers' Cache interface so that any decoder can use it.

Layout per layer: `[slot, kv_head, position, head_dim]`, one spare position at the end that takes the values of padding.
Decoding attends over a view of the first lanes (no copy); prefill gathers the lanes it fills. The engine says before
each forward which of the two comes (`begin_decode`, `begin_prefill`) and passes the 4-D mask itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache

from agentrl.inference.lanes import CacheCopy


class KVShapeProbe(Cache):  # type: ignore[misc]  # transformers is untyped here
    """A cache that only records the shape of every layer's keys and values, to size the real one for any model."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.shapes: list[tuple[torch.Size, torch.Size]] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Record and pass through."""
        self.shapes.append((key_states.shape, value_states.shape))
        return key_states, value_states


def _zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type == "cpu" and dtype is torch.float32:
        # NumPy takes zeroed pages from the system: memory is used only for positions that are written.
        return torch.from_numpy(np.zeros(shape, dtype=np.float32))
    return torch.zeros(shape, dtype=dtype, device=device)


def slot_bytes(shapes: Iterable[tuple[torch.Size, torch.Size]], capacity: int, dtype: torch.dtype) -> int:
    """Memory of one slot over all layers."""
    per_position = sum(shape[1] * shape[3] for pair in shapes for shape in pair)
    return per_position * (capacity + 1) * dtype.itemsize


class LaneCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """Keys and values of `num_slots` slots with `capacity` positions each."""

    def __init__(
        self,
        shapes: Iterable[tuple[torch.Size, torch.Size]],
        *,
        num_slots: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(layers=[])
        self._capacity = capacity
        self._stores = [
            tuple(_zeros((num_slots, shape[1], capacity + 1, shape[3]), dtype=dtype, device=device) for shape in pair)
            for pair in shapes
        ]
        self._flat = [tuple(store.view(-1, store.shape[-1]) for store in pair) for pair in self._stores]
        self._head_counts = sorted({store.shape[1] for pair in self._stores for store in pair})
        self._heads = {count: torch.arange(count, device=device) for count in self._head_counts}
        self._targets: dict[int, torch.Tensor] = {}
        self._rows_N: torch.Tensor | None = None
        self._num_rows = 0
        self._length = 0

    def begin_decode(self, positions_N: torch.Tensor, rows_N: torch.Tensor, *, length: int) -> None:
        """One token for each of the first N lanes, written at `positions_N`; attention covers `length` positions."""
        self._rows_N, self._num_rows, self._length = None, rows_N.numel(), length
        for count in self._head_counts:
            lanes_NH = rows_N[:, None] * count + self._heads[count]
            self._targets[count] = (lanes_NH * (self._capacity + 1) + positions_N[:, None]).reshape(-1)

    def begin_prefill(self, positions_NQ: torch.Tensor, rows_N: torch.Tensor, *, length: int) -> None:
        """Q tokens for each of the lanes `rows_N`. `length` 0: nothing is cached yet, they only see each other."""
        self._rows_N, self._num_rows, self._length = rows_N, rows_N.numel(), length
        for count in self._head_counts:
            lanes_NH = rows_N[:, None] * count + self._heads[count]
            self._targets[count] = (lanes_NH[:, :, None] * (self._capacity + 1) + positions_NQ[:, None, :]).reshape(-1)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new `[row, head, Q, head_dim]` states; returns what this layer attends over."""
        attended = []
        pairs = zip((key_states, value_states), self._stores[layer_idx], self._flat[layer_idx], strict=True)
        for states, store, flat in pairs:
            flat.index_copy_(0, self._targets[store.shape[1]], states.reshape(-1, states.shape[-1]))
            if self._rows_N is None:
                attended.append(store[: self._num_rows, :, : self._length])
            elif self._length:
                attended.append(store[:, :, : self._length].index_select(0, self._rows_N))
            else:
                attended.append(states)
        return attended[0], attended[1]

    def copy(self, moves: Iterable[CacheCopy]) -> None:
        """Copy prefixes between slots, in order."""
        for move in moves:
            for pair in self._stores:
                for store in pair:
                    store[move.target, :, : move.num_tokens] = store[move.source, :, : move.num_tokens]

    def erase(self, slot: int) -> None:
        """Zero a slot."""
        for pair in self._stores:
            for store in pair:
                store[slot].zero_()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Unused: positions are always passed to the model. Zero for code that only asks whether this is a prefill."""
        return 0
