"""DeepSpeed ZeRO-3, driven by hand: weights, gradients and optimizer state partitioned over all ranks.

Under Accelerate the optimizer step of DeepSpeed is part of the last backward, too early to look at the gradient. Here
its engine gets backward and step as two calls, and the norm is taken in between:

    engine.backward(loss) of every pass, the last one marked -> norm of the partitions, all ranks -> engine.step()

Checkpoints hold whole tensors by parameter name, so another number of ranks can go on from them. `deepspeed` is an
optional package: it is imported when the accelerate_config asks for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DeepSpeedPlugin, is_deepspeed_available
from safetensors.torch import load_file, save_file

from agentrl.config.sections import RunConfig
from agentrl.errors import ConfigError
from agentrl.train.optimizer import set_learning_rate

STATE_FILE = "zero3.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")
ZERO_STAGE = 3


def asks_for_deepspeed() -> bool:
    """Whether the accelerate_config says DeepSpeed."""
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"


def check_deepspeed(config: RunConfig) -> None:
    """Raise ConfigError where DeepSpeed was asked for and cannot train this run."""
    if not is_deepspeed_available():
        raise ConfigError('accelerate_config: deepspeed is not installed; run pip install "agentrl[gpu]"')
    stage = int(os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"))
    if stage != ZERO_STAGE:
        raise ConfigError(f"accelerate_config: zero_stage = {stage}; only 3 is supported (assets/deepspeed_zero3.yml)")
    if config.train.tp_size > 1 or config.train.cp_size > 1:
        raise ConfigError("accelerate_config: DeepSpeed with tp_size or cp_size above 1; use assets/fsdp2_dst.yml")


class ZeroGradients:
    """Gradients in DeepSpeed's partitions."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Reduce into the partitions; after the last pass they are handed to the optimizer."""
        self._engine.set_gradient_accumulation_boundary(is_last)
        self._engine.backward(loss, scale_wrt_gas=False)

    def clip(self) -> float:
        """The norm; DeepSpeed clips by the same in its step."""
        from deepspeed.utils import safe_get_local_grad  # optional, and slow to import

        total = torch.zeros((), dtype=torch.float64, device=self._engine.device)
        for parameter in self._engine.module.parameters():
            if parameter.requires_grad:
                total += safe_get_local_grad(parameter).double().square().sum()
        dist.all_reduce(total)
        return total.sqrt().item()

    def step(self, *, learning_rate: float) -> None:
        """Clip, update, clear."""
        set_learning_rate(self._engine.optimizer, learning_rate)
        self._engine.step()

    def forget(self) -> None:
        """Zero the partitions."""
        self._engine.optimizer.zero_grad()


def partition(policy: torch.nn.Module, *, optimizer: torch.optim.Optimizer, config: RunConfig) -> Any:
    """The DeepSpeed engine around a policy, with AdamW in float32 whatever the forward computes in."""
    import deepspeed  # optional, and slow to import

    deepspeed.init_distributed(dist_backend=dist.get_backend())  # on top of the process group that is there
    buffers = {name: buffer.clone() for name, buffer in policy.named_buffers()}
    engine, _, _, _ = deepspeed.initialize(model=policy, optimizer=optimizer, config=_engine_settings(config))
    for name, buffer in engine.module.named_buffers():  # with bf16 all were rounded, rotary frequencies too
        buffer.data = buffers[name].to(buffer.device)
    return engine


def _engine_settings(config: RunConfig) -> dict[str, Any]:
    """What the accelerate_config says of ZeRO, and what the loop takes care of itself."""
    zero = DeepSpeedPlugin().deepspeed_config["zero_optimization"]
    return {
        "zero_optimization": {name: value for name, value in zero.items() if value != "auto"},
        "train_micro_batch_size_per_gpu": 1,  # passes differ in size; gradients are weighted before DeepSpeed sees them
        "gradient_accumulation_steps": 1,  # ZeroGradients.backward says which pass is the last
        "gradient_clipping": config.train.max_grad_norm,
        "bf16": {"enabled": config.model.bf16},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
    }


def is_partitioned(tensor: torch.Tensor) -> bool:
    """Whether DeepSpeed holds this parameter in pieces."""
    return hasattr(tensor, "ds_id")


def is_engine(policy: torch.nn.Module) -> bool:
    """Whether a policy is inside DeepSpeed's engine."""
    return any(is_partitioned(parameter) for parameter in policy.parameters())


def whole_parameter(parameter: torch.Tensor) -> torch.Tensor:
    """The float32 value in one piece. Every rank must call it."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    if parameter.requires_grad:
        whole: torch.Tensor = safe_get_full_fp32_param(parameter)
        return whole
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def save_optimizer(engine: Any, directory: Path) -> None:
    """AdamW's moments of every parameter, whole, by name. Every rank must call it; rank 0 writes."""
    from deepspeed.utils import safe_get_full_optimizer_state

    inner = engine.optimizer.optimizer
    steps = {float(state["step"]) for state in inner.state.values() if "step" in state}
    tensors = {"step": torch.tensor(max(steps, default=0.0))}
    for name, parameter in _trained(engine):
        for moment in MOMENTS:
            whole = safe_get_full_optimizer_state(parameter, moment)
            if dist.get_rank() == 0:
                tensors[f"{moment}.{name}"] = whole.cpu().contiguous()
    if dist.get_rank() == 0:
        directory.mkdir(parents=True, exist_ok=True)
        save_file(tensors, directory / STATE_FILE)


def load_optimizer(engine: Any, directory: Path) -> None:
    """What `save_optimizer` wrote, into the partitions of this number of ranks.

    Raises ConfigError for a checkpoint that was not written under DeepSpeed.
    """
    from deepspeed.utils import safe_set_full_optimizer_state

    path = directory / STATE_FILE
    if not path.is_file():
        raise ConfigError(
            f"{directory}: no optimizer state of DeepSpeed; go on with the accelerate_config it was made by"
        )
    tensors = load_file(path)
    inner = engine.optimizer.optimizer
    for flat in engine.optimizer.fp32_partitioned_groups_flat:  # AdamW makes its state in the first step, too late here
        inner.state[flat] = {"step": tensors["step"].clone(), **{moment: torch.zeros_like(flat) for moment in MOMENTS}}
    for name, parameter in _trained(engine):
        for moment in MOMENTS:
            safe_set_full_optimizer_state(parameter, tensors[f"{moment}.{name}"].to(engine.device), moment)


def _trained(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, parameter) for name, parameter in engine.module.named_parameters() if parameter.requires_grad)
