"""Section `train`: optimizer, passes, checkpoints, ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from agentrl.config.section import Section


class TrainConfig(Section):
    """The trainer."""

    max_steps: int = Field(40, ge=1, description="Optimizer steps of the run.")
    learning_rate: float = Field(1e-6, gt=0, description="Peak learning rate of AdamW.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay.")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="AdamW beta1.")
    adam_beta2: float = Field(0.98, ge=0, lt=1, description="AdamW beta2.")
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Schedule after warm-up."
    )
    warmup_steps: int = Field(0, ge=0, description="Steps of linear warm-up.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradient clipping.")
    max_tokens: int = Field(16_384, ge=16, description="Token budget of one micro-batch per rank.")
    sequence_layout: Literal["auto", "per_call", "linear", "tree"] = Field(
        "auto",
        description="How rows are laid out for the trainer: one sequence per model call, one per branch, or one token "
        "tree per group with what it shares computed once; `auto` takes linear or tree per group, whichever is faster. "
        "Never changes the loss.",
    )
    pad_to_multiple_of: int = Field(1, ge=1, description="Positions of a forward pass are a multiple of this.")
    loss_seq_chunk_size: int | None = Field(
        None,
        ge=1,
        description="Positions whose logits exist at the same time; empty: 1024, fewer where the vocabulary is large.",
    )
    sft_batch_size: int = Field(128, ge=1, description="Rows per step when training on rows (CROSS_ENTROPY).")
    train_threads: int = Field(1, ge=1, description="Compute threads per trainer process on CPUs.")
    save_steps: int = Field(5, ge=1, description="Steps between checkpoints.")
    save_total_limit: int = Field(2, ge=1, description="Checkpoints kept.")
    policy_total_limit: int = Field(
        4,
        ge=4,
        description="Published policies kept, besides version 0: `agentrl whatif` replays the steps after them.",
    )
    resume_from_checkpoint: bool = Field(True, description="Continue from the newest complete checkpoint.")
    logging_steps: int = Field(1, ge=1, description="Steps between lines in the log; metrics.jsonl has every step.")
    report_to: str = Field(
        "tensorboard", description="Trackers, comma separated: tensorboard, wandb, swanlab, trackio, none."
    )
    on_alarm: Literal["warn", "pause", "stop"] = Field(
        "warn",
        description="What an alarm of the stability watch does: nothing more, wait for `agentrl resume`, end the run.",
    )
    alarm_pause_s: float = Field(86_400.0, gt=0, description="Seconds a paused trainer waits before it ends.")
    data_timeout_s: float = Field(600.0, gt=0, description="Seconds the trainer waits for a full step's groups.")
    num_processes: int = Field(1, ge=1, description="Trainer processes started by the launcher.")
    tp_size: int = Field(1, ge=1, description="Ranks that split the matrices of every layer (tensor parallel).")
    cp_size: int = Field(1, ge=1, description="Ranks that split the positions of every sequence (context parallel).")
    accelerate_config: Path | None = Field(None, description="Accelerate config file, e.g. assets/fsdp2_dst.yml.")

    @model_validator(mode="after")
    def _check_padding_fits_the_budget(self) -> TrainConfig:
        if self.pad_to_multiple_of > self.max_tokens:
            raise ValueError(
                f"pad_to_multiple_of = {self.pad_to_multiple_of}, max_tokens = {self.max_tokens}: every pass would be "
                "wider than its budget; 64 or 128 is what kernels like"
            )
        return self
