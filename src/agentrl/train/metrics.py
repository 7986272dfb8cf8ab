"""The numbers of one optimizer step: where the time went, and what the trained tokens looked like.

Every rank tallies its own passes; `merge` adds the tallies of all ranks, so a metric means the same whatever the split.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from agentrl.algo.losses import combine_metrics
from agentrl.train.batch import PassBatch
from agentrl.train.row_stats import RowStats
from agentrl.types import Float32Array

MISMATCH_PERCENTILES = (50, 95, 99)

Int64Array = npt.NDArray[np.int64]


Report = Callable[[str, int], None]
"""(phase, step): a sign of life of the trainer, called at every phase change and while waiting."""


class PhaseClock:
    """Seconds per named phase of one step, and a sign of life as each begins: `with clock.phase("load"): ...`."""

    def __init__(self, *, step: int, report: Report) -> None:
        self._step = step
        self._report = report
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside to a phase."""
        self._report(name, self._step)
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def metrics(self) -> dict[str, float]:
        """`seconds_<phase>` for each phase."""
        return {f"seconds_{name}": seconds for name, seconds in self._seconds.items()}


@dataclass(slots=True)
class StepTally:
    """What the trained tokens of one step looked like, on one rank.

    `mismatch` holds policy - behaviour log-prob of the tokens sampled at exactly the version being trained: both
    sides have equal weights there, so it measures the engines' numerical difference and nothing else.
    """

    policy_version: int
    num_trained_tokens: int = 0
    num_input_tokens: int = 0  # fed through the model, padding included
    num_sampled_tokens: int = 0  # trained tokens with behaviour log-probs
    logprob_sum: float = 0.0
    staleness_sum: int = 0
    staleness_max: int = 0
    mismatch: list[Float32Array] = field(default_factory=list)
    loss_parts: list[dict[str, float]] = field(default_factory=list)  # LossOutputs.metrics of each pass
    bad_row_ids: list[str] = field(default_factory=list)
    rows: list[RowStats] = field(default_factory=list)

    def add(self, batch: PassBatch, *, logprobs_N: torch.Tensor, loss_metrics: dict[str, float]) -> None:
        """Count one pass."""
        self.num_trained_tokens += batch.num_trained_tokens
        self.num_input_tokens += batch.input_ids_BT.numel()
        self.loss_parts.append(loss_metrics)
        logprobs = logprobs_N.detach().float().cpu().numpy()
        self.logprob_sum += float(logprobs.sum(dtype=np.float64))
        if batch.behaviour_logprobs_N is not None and logprobs.size:
            self._add_sampled(
                logprobs,
                behaviour=batch.behaviour_logprobs_N.cpu().numpy(),
                staleness=self.policy_version - batch.policy_versions_N.cpu().numpy(),
            )

    def _add_sampled(self, logprobs: Float32Array, *, behaviour: Float32Array, staleness: Int64Array) -> None:
        self.num_sampled_tokens += logprobs.size
        self.staleness_sum += int(staleness.sum())
        self.staleness_max = max(self.staleness_max, int(staleness.max()))
        self.mismatch.append((logprobs - behaviour)[staleness == 0])

    def metrics(self) -> dict[str, float]:
        """Means over trained tokens; what cannot be measured in this step is left out."""
        metrics = combine_metrics(self.loss_parts)
        metrics.pop("weight_total", None)
        metrics["clip_fraction"] = metrics["clip_fraction_low"] + metrics["clip_fraction_high"]
        metrics["num_trained_tokens"] = float(self.num_trained_tokens)
        metrics["num_input_tokens"] = float(self.num_input_tokens)
        num_positive = sum(row.num_positive for row in self.rows)
        if num_positive:
            metrics["positive_logprob_mean"] = sum(row.positive_logprob_sum for row in self.rows) / num_positive
        metrics["logprob_mean"] = self.logprob_sum / max(self.num_trained_tokens, 1)
        if self.num_sampled_tokens:
            metrics["staleness_mean"] = self.staleness_sum / self.num_sampled_tokens
            metrics["staleness_max"] = float(self.staleness_max)
        return metrics | mismatch_metrics(np.concatenate([np.zeros(0, np.float32), *self.mismatch]))


def mismatch_metrics(log_ratios_N: Float32Array) -> dict[str, float]:
    """The train/inference mismatch of tokens whose log-probs differ by this much at equal weights; none without tokens.

    Mean, percentiles and maximum of the absolute difference, and the k3 estimate of KL(behaviour || policy).
    """
    if not log_ratios_N.size:
        return {}
    exact_N = log_ratios_N.astype(np.float64)
    sizes_N = np.abs(log_ratios_N)
    percentiles = np.percentile(sizes_N, MISMATCH_PERCENTILES)
    return {
        "mismatch": float(sizes_N.mean(dtype=np.float64)),
        **{f"mismatch_p{rank}": float(value) for rank, value in zip(MISMATCH_PERCENTILES, percentiles, strict=True)},
        "mismatch_max": float(sizes_N.max()),
        "mismatch_k3": float((np.expm1(exact_N) - exact_N).mean()),
    }


def merge(tallies: Sequence[StepTally]) -> StepTally:
    """The tally of all ranks together."""
    return StepTally(
        policy_version=tallies[0].policy_version,
        num_trained_tokens=sum(tally.num_trained_tokens for tally in tallies),
        num_input_tokens=sum(tally.num_input_tokens for tally in tallies),
        num_sampled_tokens=sum(tally.num_sampled_tokens for tally in tallies),
        logprob_sum=sum(tally.logprob_sum for tally in tallies),
        staleness_sum=sum(tally.staleness_sum for tally in tallies),
        staleness_max=max(tally.staleness_max for tally in tallies),
        mismatch=[part for tally in tallies for part in tally.mismatch],
        loss_parts=[part for tally in tallies for part in tally.loss_parts],
        bad_row_ids=[row_id for tally in tallies for row_id in tally.bad_row_ids],
        rows=[row for tally in tallies for row in tally.rows],
    )
