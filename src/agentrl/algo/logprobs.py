"""Log-probs and entropy of chosen tokens without the full logits: positions are worked off in chunks, twice.

    forward    for each chunk: logits_CV = hidden @ weight.T / temperature -> keep log-prob, normaliser, entropy
    backward   for each chunk: the same logits again -> gradient of the chunk -> add into grad_hidden, grad_weight

At most one chunk of logits [chunk_size, V] exists at a time; for the backward pass 3 numbers per position are kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LONGEST_CHUNK = 1024
LOGITS_PER_CHUNK = 2**24  # 64 MiB in float32; about twice that exists at the peak


def default_chunk_size(vocabulary_size: int) -> int:
    """Positions per chunk where nothing is configured: LONGEST_CHUNK, fewer where the vocabulary is large."""
    return max(1, min(LONGEST_CHUNK, LOGITS_PER_CHUNK // vocabulary_size))


def token_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    *,
    temperature: float,
    chunk_size: int,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Log softmax(hidden @ weight.T / temperature) at `labels_N`, and the entropy of that distribution if asked for.

    Both [N], in float32 (float64 for float64 inputs), differentiable in `hidden_ND` and `weight_VD`. The product runs
    in the autocast dtype if autocast is on, else in the inputs' dtype; everything after it in float32. Labels must be
    in [0, V). Raises ValueError for a temperature or chunk size that is not positive.
    """
    if temperature <= 0:
        raise ValueError(f"temperature = {temperature}: log-probs of greedy sampling do not exist; use a positive one")
    if chunk_size < 1:
        raise ValueError(f"chunk_size = {chunk_size}: needs at least one position per chunk")
    logprobs_N, entropy_N = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]  # torch does not annotate it
        hidden_ND, weight_VD, labels_N, temperature, chunk_size, with_entropy
    )
    return logprobs_N, entropy_N if with_entropy else None


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        temperature: float,
        chunk_size: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.matmul_dtype = _matmul_dtype(hidden_ND, weight_VD)
        num_positions = hidden_ND.shape[0]
        logprobs_N = hidden_ND.new_empty(num_positions, dtype=_reduce_dtype(ctx.matmul_dtype))
        normalisers_N = torch.empty_like(logprobs_N)
        entropy_N = torch.empty_like(logprobs_N) if with_entropy else logprobs_N.new_empty(0)
        weight = weight_VD.to(ctx.matmul_dtype)
        for chunk in _chunks(num_positions, chunk_size):
            logits_CV = _logits(hidden_ND[chunk], weight, temperature=temperature)
            normalisers_N[chunk] = torch.logsumexp(logits_CV, dim=-1)
            logprobs_N[chunk] = logits_CV.gather(-1, labels_N[chunk, None]).squeeze(-1) - normalisers_N[chunk]
            if with_entropy:
                probabilities_CV = (logits_CV - normalisers_N[chunk, None]).exp_()
                entropy_N[chunk] = normalisers_N[chunk] - probabilities_CV.mul_(logits_CV).sum(dim=-1)
        ctx.save_for_backward(hidden_ND, weight_VD, labels_N, normalisers_N, entropy_N)
        ctx.temperature, ctx.chunk_size, ctx.with_entropy = temperature, chunk_size, with_entropy
        if not with_entropy:
            ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs_N: Tensor, grad_entropy_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, labels_N, normalisers_N, entropy_N = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        weight = weight_VD.to(ctx.matmul_dtype)
        grad_hidden_ND = torch.zeros_like(hidden_ND) if needs_hidden else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=normalisers_N.dtype) if needs_weight else None
        for chunk in _chunks(hidden_ND.shape[0], ctx.chunk_size):
            hidden_CD = hidden_ND[chunk].to(ctx.matmul_dtype)
            logits_CV = _logits(hidden_CD, weight, temperature=ctx.temperature)
            log_probabilities_CV = logits_CV.sub_(normalisers_N[chunk, None])
            grad_CV = _grad_logits(
                log_probabilities_CV,
                labels_C=labels_N[chunk],
                grad_logprobs_C=grad_logprobs_N[chunk],
                grad_entropy_C=grad_entropy_N[chunk] if ctx.with_entropy else None,
                entropy_C=entropy_N[chunk],
            )
            grad_CV = grad_CV.div_(ctx.temperature).to(ctx.matmul_dtype)
            if grad_hidden_ND is not None:
                grad_hidden_ND[chunk] = (grad_CV @ weight).to(hidden_ND.dtype)
            if grad_weight_VD is not None:
                grad_weight_VD.add_(grad_CV.T @ hidden_CD)
        grad_weight = None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_ND, grad_weight, None, None, None, None


def _grad_logits(
    log_probabilities_CV: Tensor,
    *,
    labels_C: Tensor,
    grad_logprobs_C: Tensor,
    grad_entropy_C: Tensor | None,
    entropy_C: Tensor,
) -> Tensor:
    """Gradient with respect to the logits after temperature: g (1[label] - p), and for entropy -h p (log p + H)."""
    if grad_entropy_C is None:
        grad_CV = log_probabilities_CV.exp_().mul_(-grad_logprobs_C[:, None])
    else:
        probabilities_CV = log_probabilities_CV.exp()
        slopes_CV = log_probabilities_CV.add_(entropy_C[:, None]).mul_(grad_entropy_C[:, None])
        grad_CV = slopes_CV.add_(grad_logprobs_C[:, None]).mul_(probabilities_CV).neg_()
    return grad_CV.scatter_add_(-1, labels_C[:, None], grad_logprobs_C[:, None])


def _logits(hidden_CD: Tensor, weight_VD: Tensor, *, temperature: float) -> Tensor:
    with torch.autocast(device_type=weight_VD.device.type, enabled=False):
        product_CV = hidden_CD.to(weight_VD.dtype) @ weight_VD.T
    return product_CV.to(_reduce_dtype(weight_VD.dtype)).div_(temperature)


def _matmul_dtype(hidden_ND: Tensor, weight_VD: Tensor) -> torch.dtype:
    device_type = weight_VD.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return torch.promote_types(hidden_ND.dtype, weight_VD.dtype)


def _reduce_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _chunks(num_positions: int, chunk_size: int) -> list[slice]:
    return [slice(start, min(start + chunk_size, num_positions)) for start in range(0, num_positions, chunk_size)]
