"""Starts Accelerate as the launcher and the run's settings say, and refuses what the loop could not train right."""

from __future__ import annotations

import datetime
import os

import torch
from accelerate import Accelerator, DistributedType, InitProcessGroupKwargs
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from transformers.utils import logging as transformers_logging

from agentrl.config.sections import RunConfig
from agentrl.errors import ConfigError
from agentrl.train._compat import allow_fsdp_on_cpu
from agentrl.train.model import prepare_torch
from agentrl.train.trackers import parse_trackers, tracker_arguments
from agentrl.train.zero3 import asks_for_deepspeed, check_deepspeed

COLLECTIVE_MARGIN_S = 1800.0  # ranks wait in a collective while rank 0 waits for data, then writes weights

SUPPORTED_DISTRIBUTION = frozenset(
    {
        DistributedType.NO,
        DistributedType.MULTI_CPU,
        DistributedType.MULTI_GPU,
        DistributedType.FSDP,
        DistributedType.DEEPSPEED,
    }
)


def start_accelerator(config: RunConfig) -> Accelerator:
    """Seeds, then the Accelerator of this process. Raises ConfigError for a launch that would train something else."""
    prepare_torch(config)
    if asks_for_deepspeed():
        check_deepspeed(config)
    transformers_logging.disable_progress_bar()
    wait_s = config.train.data_timeout_s + COLLECTIVE_MARGIN_S
    plugin = _fsdp_plugin(config)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        fsdp_plugin=plugin,
        mixed_precision="bf16" if config.model.bf16 else "no",
        kwargs_handlers=[InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=wait_s))],
        **tracker_arguments(parse_trackers(config.train.report_to), run_dir=config.run.run_dir),
    )
    if plugin is not None:
        allow_fsdp_on_cpu(accelerator, plugin)
    check_distribution(accelerator, num_wanted=config.train.num_processes)
    return accelerator


def _fsdp_plugin(config: RunConfig) -> FullyShardedDataParallelPlugin | None:
    """What the accelerate_config says about FSDP, with a precision of our own; None where it says nothing.

    Accelerate's bf16 policy would also reduce gradients and return log-probs in bfloat16: too coarse for ratios.
    """
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return None
    compute_dtype = torch.bfloat16 if config.model.bf16 else None
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    plugin = FullyShardedDataParallelPlugin(mixed_precision_policy=precision)
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    return plugin


def check_distribution(accelerator: Accelerator, *, num_wanted: int) -> None:
    """Refuse launches in which ranks would not train together, or not as the loop assumes.

    `num_wanted` is `num_processes` of the run; 1, its default, says nothing, since a launcher may be started by hand.
    """
    num_launched = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != num_launched:
        raise ConfigError(
            f"{num_launched} trainer processes were launched, but Accelerate sees {accelerator.num_processes}: each "
            "would train on its own. Check accelerate_config, and that every process has its device"
        )
    if num_wanted not in (1, num_launched):
        raise ConfigError(
            f"num_processes = {num_wanted}, but the number of trainer processes started is {num_launched}; give the "
            "number that is started, and an accelerate_config with distributed_type FSDP, DEEPSPEED or MULTI_GPU"
        )
    kind = accelerator.distributed_type
    is_fsdp1 = kind is DistributedType.FSDP and not accelerator.is_fsdp2
    if kind not in SUPPORTED_DISTRIBUTION or is_fsdp1:
        raise ConfigError(
            f"accelerate_config: distributed_type {kind.value}{' with fsdp_version 1' if is_fsdp1 else ''} is not "
            "supported, because the loop checks the gradient before the optimizer step and needs full state dicts; "
            "use FSDP with fsdp_version: 2 (assets/fsdp2_dst.yml), DeepSpeed ZeRO-3 or plain data parallel"
        )


def offload_policy(accelerator: Accelerator) -> OffloadPolicy:
    """Where the accelerate_config keeps sharded parameters: in CPU memory (fsdp_offload_params) or on the device."""
    plugin = accelerator.state.fsdp_plugin if accelerator.is_fsdp2 else None
    policy = None if plugin is None else plugin.cpu_offload
    return policy if isinstance(policy, OffloadPolicy) else OffloadPolicy()
