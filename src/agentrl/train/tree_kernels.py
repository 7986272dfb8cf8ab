"""One piece of tree attention on a CPU: its output and log-sum-exp, and its gradient given those of the whole softmax.

The gradient of a part of a softmax needs the final output and log-sum-exp only: ring attention, arXiv 2310.01889.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from agentrl.train.tree_plan import Piece, TreePlan

MASKED_SCORE = -1e30  # finite: a query that sees nothing of a piece gets weight exp(-1e30) = 0 there, and no NaN


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Whole:
    """The tensors [1, heads, T, D] of one attention call; sums [1, heads, T] are the log-sum-exp of the scores."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    sums: Tensor


class Kernel(Protocol):
    """How one piece is computed."""

    def forward(self, piece: Piece, whole: Whole) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of the piece's queries over the piece's keys alone."""
        ...

    def backward(self, piece: Piece, whole: Whole, *, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the piece's queries, keys and values through this piece."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashKernel:
    """PyTorch's own flash attention; grouped heads are its business."""

    plan: TreePlan
    scale: float
    window: int | None

    def forward(self, piece: Piece, whole: Whole) -> tuple[Tensor, Tensor]:
        """See Kernel."""
        query, key, value = _cut(piece, whole)
        mask = _window_mask(piece, plan=self.plan, window=self.window, dtype=query.dtype)
        output, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, piece.is_causal, attn_mask=mask, scale=self.scale
        )
        return output, sums

    def backward(self, piece: Piece, whole: Whole, *, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See Kernel."""
        query, key, value = _cut(piece, whole)
        at = slice(piece.q_start, piece.q_end)
        mask = _window_mask(piece, plan=self.plan, window=self.window, dtype=query.dtype)
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_output[:, :, at],
            query,
            key,
            value,
            whole.output[:, :, at],
            whole.sums[:, :, at],
            0.0,
            piece.is_causal,
            attn_mask=mask,
            scale=self.scale,
        )
        return grads


@dataclass(frozen=True, slots=True, kw_only=True)
class CappedKernel:
    """Soft-capped scores, cap * tanh(score / cap), which flash attention does not have; at least float32."""

    plan: TreePlan
    scale: float
    window: int | None
    softcap: float

    def forward(self, piece: Piece, whole: Whole) -> tuple[Tensor, Tensor]:
        """See Kernel."""
        query, key, value = _cut(piece, whole)
        scores, _ = self._scores(piece, query, key)
        sums = scores.logsumexp(-1)
        output = (scores - sums[..., None]).exp_() @ _per_query_head(value, query).to(scores.dtype)
        return output.to(query.dtype), sums

    def backward(self, piece: Piece, whole: Whole, *, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See Kernel."""
        query, key, value = _cut(piece, whole)
        at = slice(piece.q_start, piece.q_end)
        scores, tanh = self._scores(piece, query, key)
        dtype = scores.dtype
        grad = grad_output[:, :, at].to(dtype)
        probabilities = (scores - whole.sums[:, :, at, None]).exp_()
        products = (grad * whole.output[:, :, at].to(dtype)).sum(-1, keepdim=True)
        grad_scores = probabilities * (grad @ _per_query_head(value, query).to(dtype).mT - products)
        grad_scores *= (1.0 - tanh.square_()) * self.scale
        grad_key = _per_kv_head(grad_scores.mT @ query.to(dtype), key)
        grad_value = _per_kv_head(probabilities.mT @ grad, value)
        grad_query = grad_scores @ _per_query_head(key, query).to(dtype)
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)

    def _scores(self, piece: Piece, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Capped and masked scores, and the tanh for the gradient."""
        dtype = torch.promote_types(query.dtype, torch.float32)
        products = (query.to(dtype) * self.scale) @ _per_query_head(key, query).to(dtype).mT
        tanh = (products / self.softcap).tanh_()
        scores = tanh * self.softcap
        mask = _window_mask(piece, plan=self.plan, window=self.window, dtype=dtype)
        if mask is not None:
            scores = scores + mask
        if piece.is_causal:
            scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu_(1), MASKED_SCORE)
        return scores, tanh


def _cut(piece: Piece, whole: Whole) -> tuple[Tensor, Tensor, Tensor]:
    keys = slice(piece.k_start, piece.k_end)
    return whole.query[:, :, piece.q_start : piece.q_end], whole.key[:, :, keys], whole.value[:, :, keys]


def _window_mask(piece: Piece, *, plan: TreePlan, window: int | None, dtype: torch.dtype) -> Tensor | None:
    """Scores to add: 0 for keys inside the window, MASKED_SCORE for the others."""
    if not piece.is_masked or window is None:
        return None
    q_depths = plan.depths_T[piece.q_start : piece.q_end]
    k_depths = plan.depths_T[piece.k_start : piece.k_end]
    is_outside = k_depths[None, :] <= q_depths[:, None] - window
    return torch.zeros(is_outside.shape, dtype=dtype).masked_fill_(is_outside, MASKED_SCORE)


def _per_query_head(per_kv_head: Tensor, query: Tensor) -> Tensor:
    return per_kv_head.repeat_interleave(query.shape[1] // per_kv_head.shape[1], dim=1)


def _per_kv_head(per_query_head: Tensor, key: Tensor) -> Tensor:
    """Sum over the query heads of each key head."""
    return per_query_head.reshape(1, key.shape[1], -1, *per_query_head.shape[2:]).sum(2)
