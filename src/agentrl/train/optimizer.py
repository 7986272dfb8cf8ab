"""AdamW, its learning rate as a pure function of the step, and the one guarded update per step (L3)."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from agentrl.config.sections import TrainConfig

ADAM_EPSILON = 1e-8


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over all trainable parameters; norms and biases (one dimension) are not decayed."""
    # One fused update takes tensors of one mesh; tensor parallel layers have another one than the rest.
    foreach = False if config.tp_size > 1 else None
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=ADAM_EPSILON,
        foreach=foreach,
    )


def learning_rate_at(step: int, config: TrainConfig) -> float:
    """Learning rate of optimizer step `step` (from 1): linear warm-up, then constant, linear or cosine decay to 0.

    A function of the step instead of a scheduler object: a resume cannot get it wrong, and there is nothing to save.
    The decay reaches 0 one step after `max_steps`, so that the last step still learns.
    """
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    span = max(config.max_steps - config.warmup_steps, 1)
    progress = min((step - 1 - config.warmup_steps) / span, 1.0)
    factor = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[config.lr_scheduler_type]
    return config.learning_rate * factor


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Give every parameter group the step's learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def clip_gradients(parameters: Iterable[nn.Parameter], *, max_norm: float) -> float:
    """Scale all gradients to a global norm of at most `max_norm`; returns the norm before, over all ranks."""
    norm = nn.utils.clip_grad_norm_(list(parameters), max_norm)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
