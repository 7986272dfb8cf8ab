"""Where a library stops short of what the trainer needs. Each shim says what it is for and when it can go."""

from __future__ import annotations

import os

from accelerate import Accelerator, DistributedType
from accelerate.state import PartialState
from accelerate.utils import FullyShardedDataParallelPlugin


def allow_fsdp_on_cpu(accelerator: Accelerator) -> None:
    """Turn FSDP2 on for gloo ranks when the launch configuration asks for it.

    Accelerate 1.15 reads `distributed_type: FSDP` only where ranks have GPUs; CPU ranks silently become plain data
    parallel. Sharding itself works over gloo, and CI runs it there. Remove once AcceleratorState accepts FSDP for
    MULTI_CPU.
    """
    is_wanted = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if is_wanted and accelerator.distributed_type is DistributedType.MULTI_CPU:
        plugin = FullyShardedDataParallelPlugin()
        if accelerator.mixed_precision != "no":
            plugin.set_mixed_precision(accelerator.mixed_precision)
        accelerator.state.fsdp_plugin = plugin
        accelerator.state.distributed_type = DistributedType.FSDP
        PartialState().distributed_type = DistributedType.FSDP
