"""What a loss is given for one forward pass: the same in training and where a step is replayed (`whatif.py`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from agentrl.algo.losses import LossInputs, token_weights
from agentrl.config.sections import LossConfig
from agentrl.train.batch import PassBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """The denominators of a whole optimizer step, over all ranks."""

    num_sequences: int  # every row of the step, also one without trained tokens
    num_trained_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassLogprobs:
    """What the models say about the trained tokens of a pass; all [N]."""

    policy_N: torch.Tensor
    entropy_N: torch.Tensor | None
    reference_N: torch.Tensor | None


def loss_inputs(
    batch: PassBatch,
    *,
    logprobs: PassLogprobs,
    config: LossConfig,
    size: StepSize,
    policy_version: int,
    mean_rollout_weight: float | None,
) -> LossInputs:
    """The inputs of a pass. Old log-probs are the engine's without a rollout correction, else left out: see forward."""
    mask_N = torch.ones_like(batch.labels_N, dtype=torch.bool)
    behaviour_N = batch.behaviour_logprobs_N
    return LossInputs(
        policy_logprobs=logprobs.policy_N,
        advantages=batch.advantages_N,
        mask=mask_N,
        sequence_ids=batch.sequence_ids_N,
        weights=token_weights(
            mask_N,
            batch.sequence_ids_N,
            aggregation=config.aggregation,
            num_sequences=size.num_sequences,
            num_tokens=size.num_trained_tokens,
            constant_length=config.constant_length,
        ),
        old_logprobs=behaviour_N if config.old_is_behaviour else None,
        behaviour_logprobs=behaviour_N,
        reference_logprobs=logprobs.reference_N,
        entropy=logprobs.entropy_N,
        policy_versions=batch.policy_versions_N,
        current_version=policy_version,
        mean_rollout_weight=mean_rollout_weight,
    )
