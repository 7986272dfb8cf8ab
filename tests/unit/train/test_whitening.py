from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from agentrl.train.batch import PassBatch, build_pass
from agentrl.train.whitening import whitened
from golden_losses import golden_case, golden_file
from tiny_model import random_row


def batch_of(returns: Sequence[Sequence[float]], masks: Sequence[Sequence[bool]]) -> PassBatch:
    """One pass of rows whose trained tokens carry these returns; a masked token 0 stands before each row."""
    rows = []
    for index, (row_returns, mask) in enumerate(zip(returns, masks, strict=True)):
        length = len(mask) + 1
        row = random_row(f"r{index}", rng=np.random.default_rng(index), length=length, version=0)
        rows.append(
            replace(
                row,
                loss_mask=np.array([False, *mask]),
                advantages=np.array([0.0, *row_returns], dtype=np.float32),
            )
        )
    return build_pass(rows)


def alone(sums: torch.Tensor) -> torch.Tensor:
    return sums


def test_the_golden_baseline_variant_is_reproduced_in_the_trainer() -> None:
    case = golden_case("adv_reinforce_pp_baseline")
    masks = [[value == 1.0 for value in row] for row in golden_file()["inputs"][case["input"]]["mask"]]
    totals = [sum(row) for row in case["token_level_rewards"]]
    groups = case["group_ids"]
    means = {group: np.mean([t for t, g in zip(totals, groups, strict=True) if g == group]) for group in groups}
    returns = [
        [float(total - means[group])] * len(mask) for total, group, mask in zip(totals, groups, masks, strict=True)
    ]
    (batch,), metrics = whitened([batch_of(returns, masks)], sum_over_ranks=alone)
    expected = [
        value
        for row, mask in zip(case["expected"]["advantages"], masks, strict=True)
        for value, is_trained in zip(row, mask, strict=True)
        if is_trained
    ]
    assert batch.advantages_N.tolist() == pytest.approx(expected, abs=2e-6)
    assert metrics["return_std"] > 0


def test_the_split_into_passes_and_ranks_changes_nothing() -> None:
    returns = [[0.0, 1.0, 0.5], [2.0, 2.0, -1.0]]
    masks = [[True, True, True], [True, False, True]]
    (whole,), _ = whitened([batch_of(returns, masks)], sum_over_ranks=alone)
    parts = [batch_of([row], [mask]) for row, mask in zip(returns, masks, strict=True)]
    split, _ = whitened(parts, sum_over_ranks=alone)
    assert torch.cat([part.advantages_N for part in split]).tolist() == whole.advantages_N.tolist()

    values = [part.advantages_N.double() for part in parts]
    mean = float(torch.cat(values).mean())
    sums = iter(
        [
            torch.tensor([float(torch.cat(values).sum()), 5.0], dtype=torch.float64),
            torch.tensor([float((torch.cat(values) - mean).square().sum()), 5.0], dtype=torch.float64),
        ]
    )
    (one_rank,), _ = whitened(parts[:1], sum_over_ranks=lambda _: next(sums))  # the other rank holds the second row
    assert one_rank.advantages_N.tolist() == pytest.approx(whole.advantages_N[:3].tolist(), abs=1e-6)


def test_equal_returns_and_empty_steps_give_zeros() -> None:
    (batch,), metrics = whitened([batch_of([[1.0, 1.0]], [[True, True]])], sum_over_ranks=alone)
    assert batch.advantages_N.tolist() == [0.0, 0.0]
    assert metrics == {"return_mean": 1.0, "return_std": 0.0}
    (empty,), _ = whitened([build_pass([])], sum_over_ranks=alone)
    assert empty.advantages_N.numel() == 0
