"""Context parallelism: the positions of every sequence are split over a group of ranks that hold the same batch.

    T positions in 2 x size chunks      0 1 2 3            size = 2
    rank 0 computes                     0     3            an early and a late chunk: equal work under a causal mask
    rank 1 computes                       1 2

Each layer gathers the keys and values of all positions; a rank's chunk k attends to chunks 0..k. Log-probs are put
together at the end, so every rank of the group sees all tokens of a sequence, which sequence-level losses need.

PyTorch's own context_parallel has ring attention for CUDA kernels alone; gathering works wherever collectives do. It
needs memory for all keys and values of one layer, which grouped heads keep small (as in Llama 3, arXiv 2407.21783).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface

from agentrl.errors import ConfigError

ATTENTION_NAME = "agentrl_context_parallel"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextGroup:
    """The ranks that share the positions of a batch, as one of them sees it."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def share_of(self, num_positions: int, *, device: torch.device) -> ContextShare:
        """Which of the positions, padded on the right as needed, this rank computes."""
        num_chunks = 2 * self.size
        chunk = -(-num_positions // num_chunks)
        natural_2S_C = torch.arange(num_chunks * chunk, device=device).view(num_chunks, chunk)
        chunks = [(rank, num_chunks - 1 - rank) for rank in range(self.size)]
        gathered = torch.cat([natural_2S_C[list(pair)].flatten() for pair in chunks])
        return ContextShare(
            group=self,
            positions_T=natural_2S_C[list(chunks[self.rank])].flatten(),
            natural_order=torch.argsort(gathered),
            ends=tuple((index + 1) * chunk for index in chunks[self.rank]),
            chunk=chunk,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContextShare:
    """One rank's part of a batch. It travels through the model's layers to the attention as a keyword."""

    group: ContextGroup
    positions_T: torch.Tensor  # int64, the positions of this rank, in the order it computes them
    natural_order: torch.Tensor  # int64, sorts gathered positions
    ends: tuple[int, ...]  # for each chunk of this rank, the position after its last
    chunk: int  # positions in a chunk

    def tokens(self, input_ids_BT: torch.Tensor) -> torch.Tensor:
        """The columns of this rank."""
        num_padding = self.natural_order.numel() - input_ids_BT.shape[1]
        return functional.pad(input_ids_BT, (0, num_padding))[:, self.positions_T]

    def own(self, predictors_N: torch.Tensor, *, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Which of the N predictors (index into B * T) lie here [bool, N], and where in this rank's flattened part."""
        slots = torch.full_like(self.natural_order, -1)
        slots[self.positions_T] = torch.arange(self.positions_T.numel(), device=slots.device)
        slots_N = slots[predictors_N % num_positions]
        is_own_N = slots_N >= 0
        rows_N = predictors_N // num_positions
        return is_own_N, (rows_N * self.positions_T.numel() + slots_N)[is_own_N]

    def together(self, values: torch.Tensor, *, is_own_N: torch.Tensor) -> torch.Tensor:
        """Values of this rank's predictors and of all other ranks', [N] everywhere; the gradient is the rank's own."""
        alone_N = values.new_zeros(is_own_N.shape).masked_scatter(is_own_N, values)
        whole_N: torch.Tensor = _SumOverRanks.apply(alone_N, self.group.group)  # type: ignore[no-untyped-call]
        return whole_N


def check_context_parallel(causal_lm: Any) -> None:
    """Raise ConfigError for a model whose attention does not see all earlier positions."""
    config = causal_lm.config
    others = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    others += [name for name in ("sliding_window", "attn_logit_softcapping") if getattr(config, name, None)]
    if others:
        raise ConfigError(
            f"cp_size: {type(causal_lm).__name__} has {', '.join(others)}, and context parallelism here splits full "
            "causal attention alone; set cp_size 1"
        )


def context_parallel_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    context_share: ContextShare,
    scaling: float | None = None,
    **options: Any,  # what Hugging Face hands to every attention function
) -> tuple[torch.Tensor, None]:
    """Causal attention of this rank's queries [B, heads, T / size, D] to all earlier positions of the sequence."""
    unknown = [name for name in ("dropout", "sliding_window", "softcap") if options.get(name)]
    if attention_mask is not None or unknown:
        raise ValueError(f"context parallel attention is full and causal: without {unknown or 'a mask'}")
    gathered: torch.Tensor = _GatherPositions.apply(  # type: ignore[no-untyped-call]
        torch.stack([key, value]), context_share.group.group
    )
    keys, values = gathered.index_select(3, context_share.natural_order)
    parts = []
    for index, end in enumerate(context_share.ends):
        part = query[:, :, index * context_share.chunk : (index + 1) * context_share.chunk]
        parts.append(
            functional.scaled_dot_product_attention(
                part,
                keys[:, :, :end],
                values[:, :, :end],
                attn_mask=causal_lower_right(part.shape[2], end),
                scale=scaling,
                enable_gqa=True,
            )
        )
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


class _GatherPositions(torch.autograd.Function):
    """[2, B, heads, t, D] of every rank, side by side in dimension 3; backward adds up what all ranks say of each."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        size = dist.get_world_size(group)
        gathered = own.new_empty(size * own.shape[0], *own.shape[1:])
        dist.all_gather_single(gathered, own.contiguous(), group=group)
        return torch.cat(gathered.chunk(size), dim=3)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        size = dist.get_world_size(ctx.group)
        parts = torch.cat(gradient.chunk(size, dim=3))
        own = parts.new_empty(parts.shape[0] // size, *parts.shape[1:])
        dist.reduce_scatter_single(own, parts, group=ctx.group)
        return own, None


class _SumOverRanks(torch.autograd.Function):
    """The sum over the group. Backward is the identity: every rank has the whole loss, and takes its own part of it."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        whole = own.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


AttentionInterface.register(ATTENTION_NAME, context_parallel_attention)
