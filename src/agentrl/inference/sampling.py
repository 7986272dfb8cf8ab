"""Draws one token for every row of a batch of logits, with the log-probability SGLang reports. Uses torch.

A row with a `sampling_seed` is drawn with numbers that its seed and the position decide, others from one generator.
Order: penalties and biases -> / temperature -> log_softmax (this is what is reported) -> top-k, top-p, min-p -> draw.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch

from agentrl.inference.sequence import Sequence

_MIN_LOGIT = float("-inf")
_64_BITS = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One token per row, on the host. `top` has the `num_top` likeliest (log-prob, id) of each row, likeliest first."""

    token_ids: list[int]
    logprobs: list[float]
    top: list[list[tuple[float, int]]] | None


class BatchSampler:
    """Sampling settings of a fixed batch of sequences as tensors, reused while the batch stays the same."""

    def __init__(
        self, sequences: Rows[Sequence], *, vocab_size: int, eos_ids: frozenset[int], device: torch.device
    ) -> None:
        self._sequences = sequences
        self._eos_ids = eos_ids
        settings = [sequence.sampling for sequence in sequences]
        self._all_neutral = all(item.temperature == 1.0 for item in settings)
        self._temperature_N1 = torch.tensor([[item.temperature] for item in settings], device=device)
        self._greedy_N = (
            torch.tensor([item.is_greedy for item in settings], device=device)
            if any(item.is_greedy for item in settings)
            else None
        )
        self._all_greedy = all(item.is_greedy for item in settings)
        self._seeded = [
            (row, item.sampling_seed) for row, item in enumerate(settings) if item.sampling_seed is not None
        ]
        self._edits = [row for row, item in enumerate(settings) if item.edits_logits]
        self._truncates = any(item.truncates for item in settings)
        if self._truncates:
            top_k = [item.top_k if item.top_k > 0 else vocab_size for item in settings]
            self._top_k_N1 = torch.tensor(top_k, device=device)[:, None]
            self._top_p_N1 = torch.tensor([item.top_p for item in settings], device=device)[:, None]
            self._min_p_N1 = torch.tensor([item.min_p for item in settings], device=device)[:, None]
        self._num_top = max(sequence.top_logprobs_num for sequence in sequences)

    def sample(self, logits_NV: torch.Tensor, *, generator: torch.Generator) -> Sampled:
        """Draw. One transfer to the host. Rows with NaN come back as id -1."""
        logits_NV = logits_NV.float()
        for row in self._edits:
            logits_NV[row] = _edited(logits_NV[row], self._sequences[row], eos_ids=self._eos_ids)
        if not self._all_neutral:
            logits_NV = logits_NV / self._temperature_N1
        logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
        ids_N = self._draw(logprobs_NV, generator=generator)
        logprobs_N = logprobs_NV.gather(1, ids_N[:, None])[:, 0]
        ids_N = torch.where(logprobs_N.isnan(), -1, ids_N)
        host = torch.stack((ids_N.double(), logprobs_N.double())).tolist()
        return Sampled(
            token_ids=[int(token_id) for token_id in host[0]],
            logprobs=host[1],
            top=top_entries(logprobs_NV, num_top=self._num_top) if self._num_top else None,
        )

    def _draw(self, logprobs_NV: torch.Tensor, *, generator: torch.Generator) -> torch.Tensor:
        if self._all_greedy:
            return logprobs_NV.argmax(dim=-1)
        probs_NV = logprobs_NV.exp()
        if self._truncates:
            probs_NV = self._truncated(probs_NV)
        ids_N = _draw_by_inversion(probs_NV, uniform_N=self._uniform(generator))
        if self._greedy_N is None:
            return ids_N
        return torch.where(self._greedy_N, logprobs_NV.argmax(dim=-1), ids_N)

    def _uniform(self, generator: torch.Generator) -> torch.Tensor:
        """One number in [0, 1) per row."""
        uniform_N = torch.rand(len(self._sequences), generator=generator, device=generator.device, dtype=torch.float64)
        if self._seeded:
            seeded = [uniform_at(seed, len(self._sequences[row].output_ids)) for row, seed in self._seeded]
            uniform_N[[row for row, _ in self._seeded]] = torch.tensor(
                seeded, device=generator.device, dtype=torch.float64
            )
        return uniform_N

    def _truncated(self, probs_NV: torch.Tensor) -> torch.Tensor:
        """Zero what top-k, top-p and min-p exclude. The likeliest token always stays."""
        sorted_NV, order_NV = probs_NV.sort(dim=-1, descending=True, stable=True)
        rank_V = torch.arange(sorted_NV.shape[-1], device=probs_NV.device)
        before_NV = sorted_NV.cumsum(dim=-1) - sorted_NV
        out_NV = (rank_V >= self._top_k_N1) | (before_NV > self._top_p_N1)
        out_NV |= sorted_NV < sorted_NV[:, :1] * self._min_p_N1
        return torch.zeros_like(probs_NV).scatter(-1, order_NV, sorted_NV.masked_fill(out_NV, 0.0))


def uniform_at(seed: int, position: int) -> float:
    """Number `position` of the stream of `seed`, in [0, 1): SplitMix64 (Steele, Lea and Flood 2014)."""
    mixed = (seed + (position + 1) * 0x9E3779B97F4A7C15) & _64_BITS
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _64_BITS
    return ((mixed ^ (mixed >> 31)) >> 11) * 2.0**-53


def _draw_by_inversion(probs_NV: torch.Tensor, *, uniform_N: torch.Tensor) -> torch.Tensor:
    """Inverse of the cumulative distribution at one uniform number per row; never a token of probability 0."""
    cumulative_NV = probs_NV.double().cumsum(dim=-1)
    total_N1 = cumulative_NV[:, -1:]
    threshold_N1 = torch.minimum(uniform_N[:, None] * total_N1, total_N1 * (1 - 1e-12))
    ids_N1 = torch.searchsorted(cumulative_NV, threshold_N1, right=True)
    return ids_N1[:, 0].clamp(max=probs_NV.shape[-1] - 1)


def _edited(logits_V: torch.Tensor, sequence: Sequence, *, eos_ids: frozenset[int]) -> torch.Tensor:
    """Apply one request's penalties, biases and minimum length."""
    sampling = sequence.sampling
    logits_V = logits_V.clone()
    if sequence.output_ids:
        counts_V = torch.bincount(
            torch.tensor(sequence.output_ids, device=logits_V.device), minlength=logits_V.shape[0]
        ).to(logits_V.dtype)
        logits_V -= sampling.frequency_penalty * counts_V + sampling.presence_penalty * (counts_V > 0)
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*sequence.input_ids, *sequence.output_ids}), device=logits_V.device)
        values = logits_V[seen]
        penalty = sampling.repetition_penalty
        logits_V[seen] = torch.where(values > 0, values / penalty, values * penalty)
    for token_id, bias in sampling.logit_bias.items():
        logits_V[token_id] += bias
    if len(sequence.output_ids) < sampling.min_new_tokens:
        stops = [token_id for token_id in eos_ids | sampling.stop_token_ids if 0 <= token_id < logits_V.shape[0]]
        logits_V[stops] = _MIN_LOGIT
    return logits_V


def top_entries(logprobs_NV: torch.Tensor, *, num_top: int) -> list[list[tuple[float, int]]]:
    """The `num_top` likeliest (log-prob, id) of each row, likeliest first."""
    values_NK, ids_NK = logprobs_NV.topk(min(num_top, logprobs_NV.shape[-1]), dim=-1)
    return [
        list(zip(values, ids, strict=True)) for values, ids in zip(values_NK.tolist(), ids_NK.tolist(), strict=True)
    ]
