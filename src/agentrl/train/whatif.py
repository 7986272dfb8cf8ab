"""Replays a stored optimizer step under several losses, without changing anything (`agentrl whatif`).

    rows of the step ─► passes ─► policy once: log-probs, entropy ──┬─► loss A ─► d loss / d log-probs ─┐
                                                                    ├─► loss B ─► ...                   ├─► one backward
                                                                    └─► ...                             ┘   per loss

Each loss gets exactly what the trainer gives it (`loss_inputs.py`), so the run's own loss shows the numbers of its
ledger entry, up to rounding and the number of ranks. Memory: one gradient of the model per loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from agentrl.algo.losses import Loss, LossOutputs, build_loss, combine_metrics, rollout_weights
from agentrl.config.sections import LossConfig
from agentrl.train.batch import PassBatch
from agentrl.train.loss_inputs import PassLogprobs, StepSize, loss_inputs
from agentrl.train.model import PolicyModule


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedLoss:
    """One loss of a comparison, under the name it is shown by."""

    name: str
    config: LossConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LossReplay:
    """What one loss makes of a step. Fractions are of trained tokens, means use the weights of the loss."""

    name: str
    loss: float
    grad_norm: float  # before clipping, over all weights
    clip_fraction: float  # of the token weights
    muted_fraction: float  # tokens with an advantage whose policy term has no gradient
    effective_sample_fraction: float  # Kish: (sum c)^2 / (N sum c^2); c = |gradient of a token's policy term| / |A|
    ratio_mean: float
    ratio_max: float
    approx_kl: float
    entropy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A step under several losses."""

    replays: tuple[LossReplay, ...]
    cosines: tuple[tuple[float, ...], ...]  # between the gradients, in the order of `replays`; 0 where one is zero


@dataclass(slots=True, kw_only=True, eq=False)
class _Trial:
    """One loss while the passes go by."""

    named: NamedLoss
    function: Loss
    gradient_P: torch.Tensor
    mean_rollout_weight: float | None = None
    parts: list[dict[str, float]] = field(default_factory=list)
    sum_c: float = 0.0
    sum_c2: float = 0.0
    num_credited: int = 0
    num_muted: int = 0

    def add(self, outputs: LossOutputs, gradients_N: torch.Tensor, *, advantages_N: torch.Tensor) -> None:
        """Count one pass. `gradients_N`: of each token's own policy term, correction and drop mask included."""
        self.parts.append(outputs.metrics)
        credited_N = advantages_N != 0
        c_N = (gradients_N[credited_N] / advantages_N[credited_N]).abs().to(torch.float64)
        self.sum_c += float(c_N.sum())
        self.sum_c2 += float(c_N.square().sum())
        self.num_credited += int(credited_N.sum())
        self.num_muted += int((c_N == 0).sum())

    def replay(self) -> LossReplay:
        """The numbers of the whole step."""
        metrics = combine_metrics(self.parts)
        count = max(self.num_credited, 1)
        return LossReplay(
            name=self.named.name,
            loss=metrics.get("loss", 0.0),
            grad_norm=float(self.gradient_P.norm()),
            clip_fraction=metrics.get("clip_fraction_low", 0.0) + metrics.get("clip_fraction_high", 0.0),
            muted_fraction=self.num_muted / count,
            effective_sample_fraction=self.sum_c**2 / (count * self.sum_c2) if self.sum_c2 > 0 else 0.0,
            ratio_mean=metrics.get("ratio_mean", 0.0),
            ratio_max=metrics.get("ratio_max", 0.0),
            approx_kl=metrics.get("approx_kl", 0.0),
            entropy=metrics.get("entropy", 0.0),
        )


def compare_losses(
    passes: Sequence[PassBatch],
    *,
    losses: Sequence[NamedLoss],
    policy: PolicyModule,
    reference: PolicyModule | None,
    size: StepSize,
    policy_version: int,
) -> Comparison:
    """Loss, gradient and the usual numbers of every loss on the same tokens at the same weights.

    `policy` has entropy on; `reference` is needed where a loss has `kl_coef`. Raises ConfigError for a loss whose
    tensors the step does not have (no behaviour log-probs, no reference).
    """
    weights = [weight for weight in policy.parameters() if weight.requires_grad]
    num_weights = sum(weight.numel() for weight in weights)
    trials = [
        _Trial(
            named=named,
            function=build_loss(named.config),
            gradient_P=torch.zeros(num_weights, device=weights[0].device),
        )
        for named in losses
    ]
    trained = [batch for batch in passes if batch.num_trained_tokens]
    for trial in trials:
        if trial.named.config.rollout_correction_normalize:
            trial.mean_rollout_weight = _mean_rollout_weight(trial.named.config, trained, policy=policy)
    for batch in trained:
        _replay_pass(batch, trials, weights, policy=policy, reference=reference, size=size, version=policy_version)
    gradients = [trial.gradient_P for trial in trials]
    return Comparison(
        replays=tuple(trial.replay() for trial in trials),
        cosines=tuple(tuple(_cosine(one, other) for other in gradients) for one in gradients),
    )


def _replay_pass(
    batch: PassBatch,
    trials: Sequence[_Trial],
    weights: Sequence[torch.Tensor],
    *,
    policy: PolicyModule,
    reference: PolicyModule | None,
    size: StepSize,
    version: int,
) -> None:
    logprobs_N, entropy_N = policy(batch.input_ids_BT, batch.predictors_N, batch.labels_N, batch.tree)
    reference_N = None
    if reference is not None:
        with torch.no_grad():
            reference_N = reference(batch.input_ids_BT, batch.predictors_N, batch.labels_N, batch.tree)[0]
    for trial in trials:
        # The losses end at leaves of their own, so that the graph of the model is walked once per loss.
        leaf_N, entropy_leaf_N = logprobs_N.detach().requires_grad_(), entropy_N.detach().requires_grad_()
        config = trial.named.config
        outputs = trial.function(
            loss_inputs(
                batch,
                logprobs=PassLogprobs(policy_N=leaf_N, entropy_N=entropy_leaf_N, reference_N=reference_N),
                config=config,
                size=size,
                policy_version=version,
                mean_rollout_weight=trial.mean_rollout_weight,
            )
        )
        policy_term = (outputs.token_losses * outputs.factors).sum()
        (own_N,) = torch.autograd.grad(policy_term, leaf_N, retain_graph=True)
        trial.add(outputs, own_N / config.adv_scaling, advantages_N=batch.advantages_N)
        grad_N, grad_entropy_N = torch.autograd.grad(outputs.loss, [leaf_N, entropy_leaf_N], materialize_grads=True)
        is_last = trial is trials[-1]
        gradients = torch.autograd.grad(
            [logprobs_N, entropy_N],
            weights,
            grad_outputs=[grad_N, grad_entropy_N],
            retain_graph=not is_last,
            materialize_grads=True,
        )
        trial.gradient_P += torch.cat([gradient.flatten() for gradient in gradients])


@torch.no_grad()
def _mean_rollout_weight(config: LossConfig, passes: Sequence[PassBatch], *, policy: PolicyModule) -> float:
    """Mean correction weight over the trained tokens of the step."""
    total, count = 0.0, 0
    for batch in passes:
        if batch.behaviour_logprobs_N is None:
            continue
        logprobs_N, _ = policy(batch.input_ids_BT, batch.predictors_N, batch.labels_N, batch.tree)
        correction = rollout_weights(
            config,
            old_logprobs=logprobs_N,
            behaviour_logprobs=batch.behaviour_logprobs_N,
            mask=torch.ones_like(batch.labels_N, dtype=torch.bool),
            sequence_ids=batch.sequence_ids_N,
        )
        total += float(correction.weights_N.sum(dtype=torch.float64))
        count += batch.num_trained_tokens
    return total / max(count, 1)


def _cosine(one_P: torch.Tensor, other_P: torch.Tensor) -> float:
    product = float(one_P.norm()) * float(other_P.norm())
    return float(one_P @ other_P) / product if product > 0 else 0.0
