"""What each row contributed to a step: for naming the Records behind an alarm, not for the loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from agentrl.algo.losses import LossOutputs
from agentrl.train.batch import PassBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStats:
    """Sums over the trained tokens of one row, or of a rank's part of it."""

    row_id: str
    num_tokens: int
    logprob_sum: float
    entropy_sum: float  # 0 where entropy is not computed
    mismatch_sum: float  # |policy - behaviour| log-prob; 0 for supervised rows
    loss_share: float  # |sum of weight x factor x loss|
    num_positive: int  # tokens with a positive advantage
    positive_logprob_sum: float

    @property
    def record_id(self) -> str:
        """The Record the row is of."""
        return self.row_id.rpartition("/s")[0] or self.row_id


def row_stats(
    batch: PassBatch,
    *,
    logprobs_N: torch.Tensor,
    entropy_N: torch.Tensor | None,
    weights_N: torch.Tensor,
    outputs: LossOutputs,
) -> list[RowStats]:
    """One entry per row of the pass that has trained tokens."""
    logprobs = logprobs_N.detach().to(torch.float64)
    positive = (batch.advantages_N > 0).to(torch.float64)
    behaviour = batch.behaviour_logprobs_N
    columns = [
        torch.ones_like(logprobs),
        logprobs,
        torch.zeros_like(logprobs) if entropy_N is None else entropy_N.detach().to(torch.float64),
        torch.zeros_like(logprobs) if behaviour is None else (logprobs - behaviour.to(torch.float64)).abs(),
        weights_N.to(torch.float64) * outputs.factors * outputs.token_losses.detach(),
        positive,
        positive * logprobs,
    ]
    sums_BK = torch.zeros(len(batch.row_ids), len(columns), dtype=torch.float64, device=logprobs.device)
    sums_BK.index_add_(0, batch.sequence_ids_N, torch.stack(columns, dim=1))
    return [
        RowStats(
            row_id=row_id,
            num_tokens=int(count),
            logprob_sum=logprob,
            entropy_sum=entropy,
            mismatch_sum=mismatch,
            loss_share=abs(share),
            num_positive=int(num_positive),
            positive_logprob_sum=positive_logprob,
        )
        for row_id, (count, logprob, entropy, mismatch, share, num_positive, positive_logprob) in zip(
            batch.row_ids, sums_BK.tolist(), strict=True
        )
        if count
    ]
