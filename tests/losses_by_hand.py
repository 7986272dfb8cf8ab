"""A few tokens of one sequence, for checking a loss against numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from agentrl.algo.losses import LossConfig, LossInputs, LossOutputs, build_loss


def by_hand(
    config: LossConfig,
    *,
    ratios: Sequence[float],
    advantages: Sequence[float],
    mismatch: Sequence[float] | None = None,
    sequence_ids: Sequence[int] | None = None,
) -> tuple[LossOutputs, list[float]]:
    """Outputs and the gradient of each token's own loss (weights 1). `ratios` = policy / old, `mismatch` = old / mu.

    Policy log-probs are -1 everywhere.
    """
    policy = torch.full((len(ratios),), -1.0, dtype=torch.float64)
    old = policy - torch.tensor(ratios, dtype=torch.float64).log()
    tensors: dict[str, Any] = {}
    if mismatch is not None:
        tensors["behaviour_logprobs"] = old - torch.tensor(mismatch, dtype=torch.float64).log()
    inputs = LossInputs(
        policy_logprobs=policy.requires_grad_(),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        mask=torch.ones(len(ratios), dtype=torch.bool),
        sequence_ids=torch.tensor(sequence_ids or range(len(ratios))),
        weights=torch.ones(len(ratios), dtype=torch.float64),
        old_logprobs=old,
        **tensors,
    )
    outputs = build_loss(config)(inputs)
    outputs.loss.backward()
    assert policy.grad is not None
    return outputs, policy.grad.tolist()
