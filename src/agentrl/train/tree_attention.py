"""Attention over a token trie, for any Hugging Face decoder that takes its attention function by name.

On a CPU it runs in the pieces of `tree_plan.py`: the parts of a query are put together by their log-sum-exp, so there
is never a mask over all pairs of tokens. On CUDA it is one FlexAttention call (`flex_tree.py`).

The plan reaches the attention function as a keyword of the model call. Without one, a model loaded with this function
computes exactly what it computes without it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from agentrl.errors import ConfigError
from agentrl.train.tree_kernels import CappedKernel, FlashKernel, Kernel, Whole
from agentrl.train.tree_plan import MASKED_BLOCK, TreePlan


def model_arguments(plan: TreePlan) -> dict[str, Any]:
    """Keywords of a call of the model: positions, the plan, and a mask that no model builds another one over."""
    unused_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=plan.depths_T.device)
    return {"position_ids": plan.depths_T[None], "attention_mask": unused_mask, "tree_plan": plan}


def attention_name(base: str) -> str | None:
    """Name to load a model with, so that tree plans work and calls without one behave like `base`; None: it cannot."""
    return _NAMES.get(base)


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    plan: TreePlan,
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:
    """Attention of [1, heads, T, D] queries over the trie; [1, T, heads, D] as Hugging Face expects it."""
    if dropout:
        raise ConfigError(f"attention_dropout = {dropout:g}: the tree layout has none; set sequence_layout = linear")
    scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if query.is_cuda:
        from agentrl.train.flex_tree import flex_tree_attention  # compiles kernels: only where there is a GPU

        output = flex_tree_attention(query, key, value, plan=plan, scale=scale, window=sliding_window, softcap=softcap)
    else:
        output = _SegmentAttention.apply(query, key, value, plan, scale, sliding_window, softcap)  # type: ignore[no-untyped-call]
    return output.transpose(1, 2).contiguous()


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        plan: TreePlan,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        kernel: Kernel = (
            FlashKernel(plan=plan, scale=scale, window=window)
            if softcap is None
            else CappedKernel(plan=plan, scale=scale, window=window, softcap=softcap)
        )
        pieces = plan.pieces(window=window, block=None if softcap is None else MASKED_BLOCK)
        output = _empty_like_heads(query)
        sums = output.new_empty(query.shape[:3])
        whole = Whole(query=query, key=key, value=value, output=output, sums=sums)
        for piece in sorted(pieces, key=lambda piece: not piece.is_causal):  # a query's own keys come first
            part, part_sums = kernel.forward(piece, whole)
            at = slice(piece.q_start, piece.q_end)
            if piece.is_causal:
                output[:, :, at], sums[:, :, at] = part, part_sums
            else:
                _add_part(output[:, :, at], sums[:, :, at], part=part, part_sums=part_sums)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.pieces, ctx.kernel = pieces, kernel
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, sums = ctx.saved_tensors
        whole = Whole(query=query, key=key, value=value, output=output, sums=sums)
        grads = [_empty_like_heads(tensor).zero_() for tensor in (query, key, value)]
        for piece in ctx.pieces:
            parts = ctx.kernel.backward(piece, whole, grad_output=grad_output)
            spans = (slice(piece.q_start, piece.q_end), *[slice(piece.k_start, piece.k_end)] * 2)
            for grad, part, span in zip(grads, parts, spans, strict=True):
                grad[:, :, span] += part
        return (*(grad.to(query.dtype) for grad in grads), None, None, None, None)


def _empty_like_heads(tensor: Tensor) -> Tensor:
    """A [1, heads, T, D] accumulator, at least float32, that lies in memory as [1, T, heads, D]: so models read it."""
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    return torch.empty_like(tensor.transpose(1, 2), dtype=dtype, memory_format=torch.contiguous_format).transpose(1, 2)


def _add_part(output: Tensor, sums: Tensor, *, part: Tensor, part_sums: Tensor) -> None:
    """Two softmaxes over disjoint keys become the one over both, in place."""
    total = torch.logaddexp(sums, part_sums)
    output.mul_((sums - total).exp_()[..., None]).add_(part * (part_sums - total).exp_()[..., None])
    sums.copy_(total)


def _sdpa(module: nn.Module, *tensors: Any, **settings: Any) -> tuple[Tensor, Tensor | None]:
    result: tuple[Tensor, Tensor | None] = sdpa_attention_forward(module, *tensors, **settings)
    return result


def _eager(module: nn.Module, *tensors: Any, **settings: Any) -> tuple[Tensor, Tensor | None]:
    """The one that the model's own file has; transformers finds it the same way."""
    eager = sys.modules[type(module).__module__].eager_attention_forward
    result: tuple[Tensor, Tensor | None] = eager(module, *tensors, **settings)
    return result


def _with_trees(base: Callable[..., tuple[Tensor, Tensor | None]]) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """An attention function in transformers' form, whose keywords depend on the model: hence the pass-through."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        tree_plan: TreePlan | None = None,
        **settings: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if tree_plan is None:
            return base(module, query, key, value, attention_mask, **settings)
        output = tree_attention(
            query,
            key,
            value,
            plan=tree_plan,
            dropout=settings.get("dropout", 0.0),
            scaling=settings.get("scaling"),
            sliding_window=settings.get("sliding_window"),
            softcap=settings.get("softcap"),
        )
        return output, None

    return attention


_NAMES = {"sdpa": "agentrl_sdpa", "eager": "agentrl_eager"}
for _base, _function, _mask in (("sdpa", _sdpa, sdpa_mask), ("eager", _eager, eager_mask)):
    AttentionInterface.register(_NAMES[_base], _with_trees(_function))
    AttentionMaskInterface.register(_NAMES[_base], _mask)
