"""Tree attention as one FlexAttention call, for GPUs: blocks of pairs that see nothing of each other are skipped.

FlexAttention has no backward on CPUs; there `tree_attention.py` computes the same in pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from agentrl.train.tree_plan import TreePlan


def flex_tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    plan: TreePlan,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Attention of [1, heads, T, D] queries over the trie, in the same shape; heads may be grouped."""
    mask = tree_block_mask(plan, window=window)
    attend = _compiled(flex_attention, is_cuda=query.is_cuda)
    output: Tensor = attend(
        query,
        key,
        value,
        score_mod=None if softcap is None else _capped(softcap),
        block_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output


def tree_block_mask(plan: TreePlan, *, window: int | None) -> BlockMask:
    """Node q sees node k: k is q or an ancestor of it, and inside the window. Built once per plan and window."""
    key = ("block_mask", window)
    if key not in plan.prepared:
        num_nodes = plan.depths_T.numel()
        build = _compiled(create_block_mask, is_cuda=plan.depths_T.is_cuda)
        plan.prepared[key] = build(
            _sees(plan.reach_T, plan.depths_T, window=window),
            B=None,
            H=None,
            Q_LEN=num_nodes,
            KV_LEN=num_nodes,
            device=plan.depths_T.device,
        )
    mask: BlockMask = plan.prepared[key]
    return mask


def _sees(reach_T: Tensor, depths_T: Tensor, *, window: int | None) -> Callable[..., Tensor]:
    def sees(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        is_below = (k <= q) & (q < reach_T[k])
        return is_below if window is None else is_below & (depths_T[q] - depths_T[k] < window)

    return sees


@cache
def _capped(softcap: float) -> Callable[..., Tensor]:
    """One function object per cap, so that kernels are compiled once."""

    def capped(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


@cache
def _compiled(function: Callable[..., Any], *, is_cuda: bool) -> Callable[..., Any]:
    """Compiled once; without it, the block mask too would pass through a matrix of all pairs of nodes."""
    return torch.compile(function, dynamic=True) if is_cuda else function
