"""Widths of forward passes that GPU kernels like: a multiple of 8, 64 or so."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional

from agentrl.train.batch import PAD_TOKEN_ID, PassBatch


def widened(batch: PassBatch, *, multiple: int) -> PassBatch:
    """The same pass with pads on the right up to a multiple of `multiple` positions; what is trained stays the same."""
    width = batch.input_ids_BT.shape[1]
    num_pads = -width % multiple
    if num_pads == 0 or batch.tree is not None:  # a tree's plan covers exactly its nodes
        return batch
    rows_N = torch.div(batch.predictors_N, width, rounding_mode="floor")
    return replace(
        batch,
        input_ids_BT=functional.pad(batch.input_ids_BT, (0, num_pads), value=PAD_TOKEN_ID),
        predictors_N=batch.predictors_N + rows_N * num_pads,
    )
