"""Liger's fused Triton kernels for norms, rotary embeddings and MLPs of the policy model, on GPUs."""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.liger import apply_liger_kernel
from transformers.utils import is_liger_kernel_available

from agentrl.errors import ConfigError

# Liger's losses would replace a forward that the trainer does not call: log-probs are chunked here already.
KERNELS = {"cross_entropy": False, "fused_linear_cross_entropy": False}


def use_liger_kernels(causal_lm: Any) -> None:
    """Replace layers of the model by Liger's, in place.

    Raises ConfigError without a GPU, without the package, or for a model that Liger does not know.
    """
    if not torch.cuda.is_available():
        raise ConfigError(
            "use_liger_kernel = true: Liger's kernels are for GPUs and this process has none; set it to false"
        )
    if not is_liger_kernel_available():
        raise ConfigError('use_liger_kernel = true: liger-kernel is not installed; run pip install "agentrl[gpu]"')
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN  # not on CPUs

    if causal_lm.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(
            f"use_liger_kernel = true: Liger has no kernels for {type(causal_lm).__name__}; set it to false"
        )
    apply_liger_kernel(causal_lm, KERNELS)
