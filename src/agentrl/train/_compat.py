"""Where a library stops short of what the trainer needs. Each shim says what it is for and when it can go."""

from __future__ import annotations

from accelerate import Accelerator, DistributedType
from accelerate.state import PartialState
from accelerate.utils import FullyShardedDataParallelPlugin


def allow_fsdp_on_cpu(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin) -> None:
    """Turn FSDP2 on for gloo ranks.

    Accelerate 1.15 accepts `distributed_type: FSDP` only where ranks have GPUs; CPU ranks silently become plain data
    parallel. Sharding itself works over gloo, and CI runs it there. Remove once AcceleratorState accepts FSDP for
    MULTI_CPU.
    """
    if accelerator.distributed_type is DistributedType.MULTI_CPU:
        accelerator.state.fsdp_plugin = plugin
        accelerator.state.distributed_type = DistributedType.FSDP
        PartialState().distributed_type = DistributedType.FSDP
