"""From rows to the tensors of one forward pass. Legend: B rows, T positions (right-padded), N trained tokens.

    row               token_ids  P0 P1 A0 A1 T0 A2 A3 T1       loss_mask 0 0 1 1 0 1 1 0
    model input                  P0 P1 A0 A1 T0 A2             nothing after the last trained token's predictor
    predictors_N                    ^  ^     ^  ^              position t - 1 predicts token t
    labels_N                        A0 A1    A2 A3

Right padding needs no attention mask: attention is causal, so no real token ever sees a pad, and the hidden states of
pads are never read. That keeps the fast causal kernel for every decoder. Rows of like length share a pass
(`planner.forward_passes`), so little is padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from agentrl.errors import TrainingError
from agentrl.types import DBRecordData

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
        )


def build_pass(rows: Sequence[DBRecordData]) -> PassBatch:
    """Pad rows into one forward pass; no rows give a pass of one pad token that trains nothing.

    Raises TrainingError naming a row whose first token is trained (nothing predicts it), and where some rows have
    behaviour log-probs and others do not.
    """
    trained = [np.flatnonzero(row.loss_mask) for row in rows]
    _check_rows(rows, trained)
    lengths = [int(positions[-1]) if positions.size else 1 for positions in trained]
    width = max(lengths, default=1)
    input_ids = np.full((max(len(rows), 1), width), PAD_TOKEN_ID, dtype=np.int64)
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        input_ids[index, :length] = row.token_ids[:length]
    counts = [positions.size for positions in trained]
    return PassBatch(
        row_ids=tuple(row.id for row in rows),
        input_ids_BT=torch.from_numpy(input_ids),
        predictors_N=_joined([index * width + positions - 1 for index, positions in enumerate(trained)], np.int64),
        labels_N=_joined([row.token_ids[at] for row, at in zip(rows, trained, strict=True)], np.int64),
        sequence_ids_N=torch.from_numpy(np.repeat(np.arange(len(rows), dtype=np.int64), counts)),
        advantages_N=_joined([row.advantages[at] for row, at in zip(rows, trained, strict=True)], np.float32),
        policy_versions_N=_joined([row.policy_versions[at] for row, at in zip(rows, trained, strict=True)], np.int64),
        behaviour_logprobs_N=_behaviour_logprobs(rows, trained),
    )


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
