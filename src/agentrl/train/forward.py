"""One optimizer step's mathematics: passes forward and backward with exact weights, then one guarded update.

    denominators from the plan: all rows, all ranks      fixed before the first pass (L1)
      for each pass: log-probs -> loss = sum(w * l) -> backward
    any non-finite loss or gradient norm, on any rank -> TrainingError naming the rows; weights untouched (L3)
    clip once -> AdamW once

Old log-probs. There is one update per step, so the policy recomputed before it as "old" is the policy itself without
gradient: `recompute_old_logprobs` costs no forward, and its ratios start at 1. Without it the behaviour log-probs of
the engine take old's place: the ratio is policy / behaviour, and clipping bounds how far a stale token may pull. A
rollout correction needs both sides: old is always the policy there, and the correction sees policy / behaviour.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from agentrl.algo.losses import Loss, LossOutputs, build_loss, rollout_weights
from agentrl.config.sections import LossConfig
from agentrl.errors import TrainingError
from agentrl.train.batch import PassBatch
from agentrl.train.gradients import Gradients
from agentrl.train.loss_inputs import PassLogprobs, StepSize, loss_inputs
from agentrl.train.metrics import StepTally, merge
from agentrl.train.model import PolicyModule
from agentrl.train.parallel import Ranks
from agentrl.train.row_stats import row_stats

MAX_NAMED_ROWS = 8


class Learner:
    """Model, optimizer and loss of this rank. `step` either makes exactly one update or none and raises."""

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        policy: PolicyModule,
        optimizer: torch.optim.Optimizer,
        reference: PolicyModule | None,
        loss: LossConfig,
        gradients: Gradients,
        ranks: Ranks,
    ) -> None:
        self.policy = policy
        self.optimizer = optimizer
        self._accelerator = accelerator
        self._reference = reference
        self._loss = loss
        self._loss_function: Loss = build_loss(loss)
        self.gradients = gradients
        self._ranks = ranks

    def forward_backward(self, passes: Sequence[PassBatch], *, size: StepSize, policy_version: int) -> StepTally:
        """Accumulate the gradient of the whole step; returns the tally of all ranks.

        Raises TrainingError, on every rank, if a loss or log-prob of any rank is not finite.
        """
        tally = StepTally(policy_version=policy_version)
        mean_weight = self._mean_rollout_weight(passes) if self._loss.rollout_correction_normalize else None
        for number, batch in enumerate(passes, start=1):
            loss = self._loss_of(batch.to(self._accelerator.device), tally, size=size, mean_rollout_weight=mean_weight)
            self.gradients.backward(loss, is_last=number == len(passes))
        total = merge(gather_object([tally] if self._ranks.counts else []))
        if total.bad_row_ids:
            self.gradients.forget()
            raise TrainingError(
                f"non-finite loss or log-probs in {_named(total.bad_row_ids)}; the step was not made, weights are "
                "unchanged. Inspect these rows (agentrl inspect) and the learning rate of the steps before"
            )
        return total

    def update(self, passes: Sequence[PassBatch], *, size: StepSize, learning_rate: float) -> float:
        """Clip, step, clear. Returns the gradient norm before clipping.

        Raises TrainingError, on every rank, if the gradient is not finite; then nothing is changed.
        """
        norm = self.gradients.clip()
        if not torch.isfinite(torch.tensor(norm)):
            rows = self._rows_of_bad_gradient(passes, size=size)
            raise TrainingError(
                f"gradient norm is {norm} although the loss is finite; first seen in {_named(rows)}. "
                "The step was not made, weights are unchanged"
            )
        self.gradients.step(learning_rate=learning_rate)
        return norm

    def _loss_of(
        self, batch: PassBatch, tally: StepTally, *, size: StepSize, mean_rollout_weight: float | None
    ) -> torch.Tensor:
        """The loss to go backward from: this pass's share, as the average over ranks will need it."""
        if batch.num_trained_tokens == 0:
            # Every weight must still see a backward: other ranks wait in this pass's collectives.
            probe_N = torch.zeros(1, dtype=torch.int64, device=batch.input_ids_BT.device)
            logprobs_N, _ = self.policy(batch.input_ids_BT, probe_N, probe_N)
            nothing: torch.Tensor = logprobs_N.sum() * 0.0
            return nothing
        logprobs_N, entropy_N = self.policy(batch.input_ids_BT, batch.predictors_N, batch.labels_N, batch.tree)
        logprobs = PassLogprobs(policy_N=logprobs_N, entropy_N=entropy_N, reference_N=self._reference_logprobs(batch))
        inputs = loss_inputs(
            batch,
            logprobs=logprobs,
            config=self._loss,
            size=size,
            policy_version=tally.policy_version,
            mean_rollout_weight=mean_rollout_weight,
        )
        outputs = self._loss_function(inputs)
        tally.bad_row_ids.extend(_bad_rows(batch, outputs, logprobs_N))
        # The loss compares old with behaviour; where old *is* behaviour its mismatch is 0 and says nothing.
        hidden = {"mismatch_kl"} if self._loss.old_is_behaviour else set()
        loss_metrics = {name: value for name, value in outputs.metrics.items() if name not in hidden}
        tally.rows += row_stats(
            batch, logprobs_N=logprobs_N, entropy_N=entropy_N, weights_N=inputs.weights, outputs=outputs
        )
        tally.add(batch, logprobs_N=logprobs_N, loss_metrics=loss_metrics)
        # Frameworks average gradients over ranks; the weights already hold the global denominator.
        return outputs.loss * self._ranks.num_gradients

    @torch.no_grad()
    def _mean_rollout_weight(self, passes: Sequence[PassBatch]) -> float:
        """Mean correction weight over the trained tokens of the step, all ranks: one more forward of every pass."""
        total = torch.zeros(2, dtype=torch.float64, device=self._accelerator.device)
        for cpu_batch in passes:
            batch = cpu_batch.to(self._accelerator.device)
            logprobs_N, _ = self.policy(batch.input_ids_BT, batch.predictors_N, batch.labels_N, batch.tree)
            if batch.behaviour_logprobs_N is None:
                continue
            correction = rollout_weights(
                self._loss,
                old_logprobs=logprobs_N,
                behaviour_logprobs=batch.behaviour_logprobs_N,
                mask=torch.ones_like(batch.labels_N, dtype=torch.bool),
                sequence_ids=batch.sequence_ids_N,
            )
            total[0] += correction.weights_N.sum(dtype=torch.float64)
            total[1] += batch.num_trained_tokens
        weight_sum, num_tokens = self._accelerator.reduce(total, reduction="sum").tolist()
        return float(weight_sum) / max(float(num_tokens), 1.0)

    def _reference_logprobs(self, batch: PassBatch) -> torch.Tensor | None:
        if self._reference is None:
            return None
        with torch.no_grad():
            logprobs_N: torch.Tensor = self._reference(
                batch.input_ids_BT, batch.predictors_N, batch.labels_N, batch.tree
            )[0]
        return logprobs_N

    def _rows_of_bad_gradient(self, passes: Sequence[PassBatch], *, size: StepSize) -> list[str]:
        """Repeat the passes one by one; the rows of the first, over all ranks, whose own gradient is not finite."""
        for batch in passes:
            self.gradients.forget()
            tally = StepTally(policy_version=0)
            loss = self._loss_of(batch.to(self._accelerator.device), tally, size=size, mean_rollout_weight=1.0)
            self.gradients.backward(loss, is_last=True)
            norm = self.gradients.clip()
            self.gradients.forget()
            if not torch.isfinite(torch.tensor(norm)):
                return self._everybodys([batch])
        return self._everybodys(passes)

    def _everybodys(self, passes: Sequence[PassBatch]) -> list[str]:
        row_ids = [batch.row_ids for batch in passes] if self._ranks.counts else []
        return [row_id for ids in gather_object(row_ids) for row_id in ids]


def _bad_rows(batch: PassBatch, outputs: LossOutputs, logprobs_N: torch.Tensor) -> list[str]:
    finite_N = torch.isfinite(logprobs_N.detach()) & torch.isfinite(outputs.token_losses.detach())
    if bool(torch.isfinite(outputs.loss.detach())) and bool(finite_N.all()):
        return []
    indices = sorted(set(batch.sequence_ids_N[~finite_N].tolist())) or range(len(batch.row_ids))
    return [batch.row_ids[index] for index in indices]


def _named(row_ids: Sequence[str]) -> str:
    named = ", ".join(row_ids[:MAX_NAMED_ROWS])
    more = len(row_ids) - MAX_NAMED_ROWS
    return f"row(s) {named}" + (f" and {more} more" if more > 0 else "")
