"""Aggregation as per-token weights: the loss of an optimizer step is the sum of weight x token loss, however split."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from agentrl.algo.losses.interface import sum_by_sequence

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"]


def token_weights(
    mask: Tensor,
    sequence_ids: Tensor,
    *,
    aggregation: Aggregation,
    num_sequences: int,
    num_tokens: int | None = None,
    constant_length: int | None = None,
) -> Tensor:
    """Weights [N] in float64 of the tokens given; 0 where `mask` is False.

        token_mean            1 / N             N = `num_tokens`: trained tokens of the whole step
        seq_mean_token_mean   1 / (B |o_i|)     B = `num_sequences`: all rows of the step, fully masked ones too
        seq_mean_token_sum    1 / B
        constant              1 / (B L)         L = `constant_length`

    `num_sequences` and `num_tokens` count the whole optimizer step over all ranks, while `mask` and `sequence_ids` [N]
    may hold one micro-batch of whole sequences. `num_tokens` None: the tokens given are the whole step. Where the
    framework averages gradients over ranks, multiply the loss by the number of ranks.
    Raises ValueError if a count is missing or not positive.
    """
    mask_N = mask.bool()
    ones_N = mask_N.to(torch.float64)
    if aggregation == "token_mean":
        total = int(mask_N.sum()) if num_tokens is None else num_tokens
        return ones_N / max(total, 1)
    if num_sequences < 1 and mask_N.numel():
        raise ValueError(f"num_sequences = {num_sequences}: count every sequence of the optimizer step")
    weights_N = ones_N / max(num_sequences, 1)
    if aggregation == "seq_mean_token_sum":
        return weights_N
    if aggregation == "constant":
        if constant_length is None or constant_length < 1:
            raise ValueError(f'constant_length = {constant_length}: aggregation = "constant" needs a positive length')
        return weights_N / constant_length
    if aggregation != "seq_mean_token_mean":
        raise ValueError(f"aggregation = {aggregation!r}: unknown")
    unique_B, sequences_N = torch.unique(sequence_ids, return_inverse=True)
    lengths_N = sum_by_sequence(ones_N, sequences_N, num_sequences=int(unique_B.numel()))
    return weights_N / lengths_N.clamp(min=1.0)
