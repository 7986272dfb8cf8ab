"""Policy losses as pure functions of per-token tensors (docs/algorithms.md).

    weights = token_weights(mask, sequence_ids, aggregation=config.aggregation, num_sequences=..., num_tokens=...)
    outputs = build_loss(config)(LossInputs(policy_logprobs=..., advantages=..., mask=..., sequence_ids=...,
                                            weights=weights))
    (outputs.loss * num_ranks).backward()          # where the framework averages gradients over ranks

Loss and gradient do not depend on how a step is split into micro-batches and ranks: all denominators are in `weights`.
"""

from agentrl.algo.losses.build import Loss, build_loss
from agentrl.algo.losses.correction import RolloutWeights, rollout_weights
from agentrl.algo.losses.interface import LossInputs, LossOutputs, Tokens, TokenTerms
from agentrl.algo.losses.metrics import combine_metrics
from agentrl.algo.losses.registry import policy_term
from agentrl.algo.losses.user_loss import file_sha256
from agentrl.algo.losses.weights import token_weights
from agentrl.config.sections import LossConfig

__all__ = [
    "Loss",
    "LossConfig",
    "LossInputs",
    "LossOutputs",
    "RolloutWeights",
    "TokenTerms",
    "Tokens",
    "build_loss",
    "combine_metrics",
    "file_sha256",
    "policy_term",
    "rollout_weights",
    "token_weights",
]
