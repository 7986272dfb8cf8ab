"""The settings of the policy model."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from agentrl.config.section import Section


class ModelConfig(Section):
    """The policy model."""

    model_name_or_path: Path | None = Field(None, description="Model directory in Hugging Face format, with tokenizer.")
    attention_implementation: str = Field("sdpa", description="Attention kernel of the trainer.")
    bf16: bool = Field(False, description="bfloat16 parameters with float32 reductions. Off on CPUs.")
    gradient_checkpointing: bool = Field(False, description="Recompute activations in the backward pass.")
    activation_offloading: bool = Field(
        False, description="As gradient_checkpointing, and what it keeps of each layer waits in CPU memory."
    )
    use_liger_kernel: bool = Field(False, description="Liger's fused Triton kernels in the model; needs a GPU.")
    lora_rank: int = Field(0, ge=0, description="Rank of a LoRA adapter that is trained in the model's place; 0: off.")
    lora_alpha: float | None = Field(
        None, gt=0, description="The adapter is added with weight alpha / rank; empty: twice lora_rank."
    )
    lora_target_modules: str = Field(
        "all-linear", description="Layers with an adapter: names, comma separated, or all linear ones but the head."
    )
    chat_template: Path | None = Field(None, description="Jinja file that replaces the tokenizer's chat template.")
