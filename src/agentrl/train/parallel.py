"""Which rank does what: data, context and tensor parallel ranks, and tensor parallel layers under FSDP2.

    num_processes = data x cp_size x tp_size          tensor ranks are neighbours: they talk most
    rank            0  1  2  3  4  5  6  7            tp_size = 2, cp_size = 2, so data = 2
    tensor          0  1  0  1  0  1  0  1            each holds a slice of every layer's matrices
    context         0  0  1  1  0  0  1  1            each computes a part of the positions (train/context.py)
    data            0  0  0  0  1  1  1  1            each trains its own sequences

Ranks that differ in data or context shard the weights among them; gradients are averaged over these. Embedding, head
and norms are whole in every tensor rank: their gradients come out equal there, but for norms within split heads.

Accelerate's ParallelismConfig is not used: with FSDP2 its tensor parallelism (1.15) needs a class that transformers
(5.24) no longer has, and its context parallelism has attention for CUDA alone. Meshes and FSDP2 are PyTorch's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from agentrl.config.sections import TrainConfig
from agentrl.errors import ConfigError
from agentrl.train.context import ContextGroup

STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_
PARTIAL_STYLE = "replicated_with_grad_allreduce"  # transformers' name: a norm within split heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process's place among the ranks."""

    num_data: int = 1
    data_rank: int = 0
    context: ContextGroup | None = None
    mesh: DeviceMesh | None = None  # ("shard", "tensor"), with tp_size above 1

    @property
    def num_gradients(self) -> int:
        """Over how many ranks frameworks average a gradient."""
        return self.num_data * (1 if self.context is None else self.context.size)

    @property
    def counts(self) -> bool:
        """Whether this rank's numbers are counted: of ranks with the same sequences, one does."""
        is_first_context = self.context is None or self.context.rank == 0
        return is_first_context and (self.mesh is None or self.mesh["tensor"].get_local_rank() == 0)


def arrange_ranks(config: TrainConfig, *, num_processes: int, process_index: int, device_type: str) -> Ranks:
    """The layout drawn above. Every rank must call it. Raises ConfigError if the sizes do not divide the ranks."""
    tensor, context = config.tp_size, config.cp_size
    if num_processes % (tensor * context):
        raise ConfigError(
            f"tp_size x cp_size = {tensor} x {context}, num_processes = {num_processes}: the processes are no multiple "
            "of it; change num_processes"
        )
    num_data = num_processes // (tensor * context)
    if tensor == context == 1:
        return Ranks(num_data=num_data, data_rank=process_index)
    whole = init_device_mesh(device_type, (num_data, context, tensor), mesh_dim_names=("data", "context", "tensor"))
    context_group = None
    if context > 1:
        context_mesh = whole["context"]
        context_group = ContextGroup(
            group=context_mesh.get_group(), rank=context_mesh.get_local_rank(), size=context_mesh.size()
        )
    mesh = None
    if tensor > 1:
        mesh = init_device_mesh(device_type, (num_data * context, tensor), mesh_dim_names=("shard", "tensor"))
    return Ranks(num_data=num_data, data_rank=process_index // (tensor * context), context=context_group, mesh=mesh)


def split_layers(causal_lm: Any, *, mesh: DeviceMesh) -> None:
    """Split the matrices of every decoder layer over the tensor ranks, by the plan the model's class brings.

    Raises ConfigError for a model without a plan, with layers the plan treats otherwise, or with too few heads.
    """
    size = mesh.size()
    plan = {name: style for name, style in (causal_lm.tp_plan or {}).items() if "layers.*" in name}
    unknown = sorted({style for style in plan.values() if style not in {*STYLES, PARTIAL_STYLE}})
    if not plan or unknown:
        raise ConfigError(
            f"tp_size = {size}: {type(causal_lm).__name__} has "
            + (f"layers of style {', '.join(unknown)}, which are not split here" if plan else "no tensor parallel plan")
            + "; set tp_size 1, FSDP2 shards every model"
        )
    config = causal_lm.config
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        count = getattr(config, name)
        if count % size:
            raise ConfigError(f"tp_size = {size}: {name} = {count} of the model is no multiple of it")
    styles: dict[str, ParallelStyle] = {name: STYLES[style]() for name, style in plan.items() if style in STYLES}
    parallelize_module(causal_lm, mesh, styles)


def shard_over_data_ranks(
    policy: Any, *, mesh: DeviceMesh, compute_dtype: torch.dtype | None, offload: OffloadPolicy
) -> None:
    """FSDP2 over the ranks that are not tensor ranks, layer by layer, beside the tensor parallel split."""
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for module in policy.causal_lm.modules():
        if type(module).__name__ in policy.causal_lm._no_split_modules:
            fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload)
    fully_shard(policy, mesh=mesh, mp_policy=precision, offload_policy=offload)


def broadcast_parameters(module: nn.Module) -> None:
    """Give every rank the weights of rank 0, which may be the only one that read them."""
    for parameter in module.parameters():
        dist.broadcast(parameter.data, src=0)


def partial_parameters(causal_lm: Any) -> Iterator[nn.Parameter]:
    """Weights whole in every tensor rank of which a rank's gradient covers its own heads alone."""
    patterns = [f"{name}.*" for name, style in (causal_lm.tp_plan or {}).items() if style == PARTIAL_STYLE]
    for name, parameter in causal_lm.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            yield parameter


def clip_split_gradients(causal_lm: Any, *, mesh: DeviceMesh, max_norm: float) -> float:
    """Finish the gradients of a tensor parallel model, then clip them; returns the norm before, over all ranks."""
    for parameter in partial_parameters(causal_lm):
        if parameter.grad is not None:
            dist.all_reduce(_local(parameter.grad), group=mesh["tensor"].get_group())
    gradients = [parameter.grad for parameter in causal_lm.parameters() if parameter.grad is not None]
    squares = torch.zeros(2, dtype=torch.float64, device=mesh.device_type)  # of whole and of split weights
    for gradient in gradients:
        is_split = isinstance(gradient, DTensor) and "tensor" in (gradient.device_mesh.mesh_dim_names or ())
        squares[int(is_split)] += _local(gradient).double().square().sum().to(squares.device)
    dist.all_reduce(squares, group=mesh["shard"].get_group())
    dist.all_reduce(squares[1:], group=mesh["tensor"].get_group())
    norm = squares.sum().sqrt().item()
    # torch's own clipping takes tensors of one mesh; NaN fails both comparisons and is left for the caller to see.
    if norm > max_norm:
        for gradient in gradients:
            _local(gradient).mul_(max_norm / (norm + CLIP_EPSILON))
    return norm


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local
