"""REINFORCE++'s last step: returns become advantages over the whole optimizer step, all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from agentrl.algo.advantages import WHITENING_EPS
from agentrl.train.batch import PassBatch

SumOverRanks = Callable[[torch.Tensor], torch.Tensor]


def whitened(passes: Sequence[PassBatch], *, sum_over_ranks: SumOverRanks) -> tuple[list[PassBatch], dict[str, float]]:
    """The passes with (return - mean) / sqrt(variance + 1e-8) over all trained tokens of the step, and both numbers.

    The variance is unbiased. Every rank must call it. Sums are in float64, so they do not depend on the split.
    """
    values = [batch.advantages_N.to(torch.float64) for batch in passes]
    total, count = _sums(values, sum_over_ranks)
    mean = total / max(count, 1.0)
    squares, _ = _sums([(value_N - mean).square() for value_N in values], sum_over_ranks)
    variance = squares / max(count - 1.0, 1.0)
    scale = (variance + WHITENING_EPS) ** -0.5
    centred = [((value_N - mean) * scale).to(torch.float32) for value_N in values]
    batches = [replace(batch, advantages_N=value_N) for batch, value_N in zip(passes, centred, strict=True)]
    return batches, {"return_mean": mean, "return_std": variance**0.5}


def _sums(values: Sequence[torch.Tensor], sum_over_ranks: SumOverRanks) -> tuple[float, float]:
    total = sum((float(value_N.sum()) for value_N in values), 0.0)
    count = sum(value_N.numel() for value_N in values)
    summed = sum_over_ranks(torch.tensor([total, float(count)], dtype=torch.float64))
    return float(summed[0]), float(summed[1])
