"""From rows to the tensors of one forward pass. Legend: B rows, T positions (right-padded), N trained tokens.

    row               token_ids  P0 P1 A0 A1 T0 A2 A3 T1       loss_mask 0 0 1 1 0 1 1 0
    model input                  P0 P1 A0 A1 T0 A2             nothing after the last trained token's predictor
    predictors_N                    ^  ^     ^  ^              position t - 1 predicts token t
    labels_N                        A0 A1    A2 A3

Right padding needs no attention mask: attention is causal, so no real token ever sees a pad, and the hidden states of
pads are never read. That keeps the fast causal kernel for every decoder. Rows of like length share a pass
(`passes.forward_passes`), so little is padded.

The other layouts feed the same trained tokens in other positions. per_call repeats a row for every model call, up to
its predictors; tree lays out the token trie of all rows as one sequence (B = 1) with a plan for its attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from agentrl.algo.layouts import RowLayout
from agentrl.algo.trie import build_trie, input_tokens, model_calls
from agentrl.errors import TrainingError
from agentrl.train.tree_plan import TreePlan
from agentrl.types import DBRecordData, Int32Array

PAD_TOKEN_ID = 0  # any valid id will do: see above


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassBatch:
    """One forward pass. All `_N` tensors are aligned; a pass without rows has N = 0 and keeps the ranks in step."""

    row_ids: tuple[str, ...]
    input_ids_BT: torch.Tensor  # int64
    predictors_N: torch.Tensor  # int64, index into the flattened B * T positions
    labels_N: torch.Tensor  # int64
    sequence_ids_N: torch.Tensor  # int64, position of the row in the pass (`row_ids`)
    advantages_N: torch.Tensor  # float32
    policy_versions_N: torch.Tensor  # int64, -1 for supervised rows
    behaviour_logprobs_N: torch.Tensor | None  # float32; None for supervised rows
    tree: TreePlan | None = None  # of the one sequence of a tree pass

    @property
    def num_trained_tokens(self) -> int:
        """N."""
        return self.labels_N.numel()

    def to(self, device: torch.device) -> PassBatch:
        """The same batch on a device."""
        behaviour = self.behaviour_logprobs_N
        return PassBatch(
            row_ids=self.row_ids,
            input_ids_BT=self.input_ids_BT.to(device),
            predictors_N=self.predictors_N.to(device),
            labels_N=self.labels_N.to(device),
            sequence_ids_N=self.sequence_ids_N.to(device),
            advantages_N=self.advantages_N.to(device),
            policy_versions_N=self.policy_versions_N.to(device),
            behaviour_logprobs_N=None if behaviour is None else behaviour.to(device),
            tree=None if self.tree is None else self.tree.to(device),
        )


def build_pass(rows: Sequence[DBRecordData], *, layout: RowLayout = RowLayout.LINEAR) -> PassBatch:
    """Lay rows out for one forward pass; no rows give a pass of one pad token that trains nothing.

    The `_N` tensors hold the same values in the same order whatever the layout; only what is fed and `predictors_N`
    differ. Raises TrainingError naming a row whose first token is trained (nothing predicts it), and where some rows
    have behaviour log-probs and others do not.
    """
    trained = [np.flatnonzero(row.loss_mask) for row in rows]
    _check_rows(rows, trained)
    fed = _LAYOUTS[layout](rows) if rows else _padded([np.full(1, PAD_TOKEN_ID, dtype=np.int32)])
    return PassBatch(
        row_ids=tuple(row.id for row in rows),
        input_ids_BT=torch.from_numpy(fed.input_ids_BT),
        predictors_N=_joined(fed.predictors, np.int64),
        labels_N=_joined([row.token_ids[at] for row, at in zip(rows, trained, strict=True)], np.int64),
        sequence_ids_N=torch.from_numpy(
            np.repeat(np.arange(len(rows), dtype=np.int64), [positions.size for positions in trained])
        ),
        advantages_N=_joined([row.advantages[at] for row, at in zip(rows, trained, strict=True)], np.float32),
        policy_versions_N=_joined([row.policy_versions[at] for row, at in zip(rows, trained, strict=True)], np.int64),
        behaviour_logprobs_N=_behaviour_logprobs(rows, trained),
        tree=fed.tree,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Fed:
    """What a layout feeds, and per row where the predictors of its trained tokens are in it."""

    input_ids_BT: np.ndarray
    predictors: Sequence[np.ndarray] = ()
    tree: TreePlan | None = None


def _linear(rows: Sequence[DBRecordData]) -> _Fed:
    fed = _padded([input_tokens(row) for row in rows])
    width = fed.input_ids_BT.shape[1]
    predictors = [index * width + np.flatnonzero(row.loss_mask) - 1 for index, row in enumerate(rows)]
    return _Fed(input_ids_BT=fed.input_ids_BT, predictors=predictors)


def _per_call(rows: Sequence[DBRecordData]) -> _Fed:
    calls = [[row.token_ids[: end - 1] for _, end in model_calls(row)] for row in rows]
    fed = _padded([*chain.from_iterable(calls)] or [input_tokens(row) for row in rows])
    width = fed.input_ids_BT.shape[1]
    first_call = np.cumsum([0, *map(len, calls)])
    predictors = []
    for row, first in zip(rows, first_call, strict=False):
        spans = [(first + k) * width + np.arange(start, end) - 1 for k, (start, end) in enumerate(model_calls(row))]
        predictors.append(np.concatenate([np.zeros(0, dtype=np.int64), *spans]))
    return _Fed(input_ids_BT=fed.input_ids_BT, predictors=predictors)


def _tree(rows: Sequence[DBRecordData]) -> _Fed:
    trie = build_trie([input_tokens(row) for row in rows])
    trained = [np.flatnonzero(row.loss_mask) for row in rows]
    return _Fed(
        input_ids_BT=trie.token_ids_N.astype(np.int64)[None],
        predictors=[path[at - 1] for path, at in zip(trie.paths, trained, strict=True)],
        tree=TreePlan.of_trie(trie),
    )


_LAYOUTS = {RowLayout.LINEAR: _linear, RowLayout.PER_CALL: _per_call, RowLayout.TREE: _tree}


def _padded(sequences: Sequence[Int32Array]) -> _Fed:
    width = max(sequence.size for sequence in sequences)
    input_ids_BT = np.full((len(sequences), width), PAD_TOKEN_ID, dtype=np.int64)
    for index, sequence in enumerate(sequences):
        input_ids_BT[index, : sequence.size] = sequence
    return _Fed(input_ids_BT=input_ids_BT)


def _check_rows(rows: Sequence[DBRecordData], trained: Sequence[np.ndarray]) -> None:
    for row, positions in zip(rows, trained, strict=True):
        if positions.size and positions[0] == 0:
            raise TrainingError(f"row {row.id} trains its first token, which nothing predicts; mask it")
    without = [row.id for row in rows if row.behaviour_logprobs is None]
    if without and len(without) < len(rows):
        raise TrainingError(f"rows without behaviour log-probs among sampled ones: {', '.join(without)}")


def _behaviour_logprobs(rows: Sequence[DBRecordData], trained: Sequence[np.ndarray]) -> torch.Tensor | None:
    parts = [
        row.behaviour_logprobs[at] for row, at in zip(rows, trained, strict=True) if row.behaviour_logprobs is not None
    ]
    return _joined(parts, np.float32) if parts else None


def _joined(parts: Sequence[np.ndarray], dtype: type[np.generic]) -> torch.Tensor:
    if not parts:
        return torch.from_numpy(np.zeros(0, dtype=dtype))
    return torch.from_numpy(np.concatenate(parts).astype(dtype, copy=False))
