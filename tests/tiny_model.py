"""A random Qwen3 with tied embeddings, rows for it, and the settings of a trainer run on one CPU thread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.config.sections import RunConfig
from agentrl.types import DBRecordData

VOCABULARY_SIZE = 48


def tiny_qwen3(*, seed: int = 0, num_key_value_heads: int = 1) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2 * num_key_value_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=16,
        intermediate_size=64,
        tie_word_embeddings=True,
        max_position_embeddings=256,
    )
    return Qwen3ForCausalLM(config)


def write_tiny_model(directory: Path, *, seed: int = 0, num_key_value_heads: int = 1) -> Path:
    """Weights, config and a stand-in tokenizer file (the trainer copies it and never reads it)."""
    tiny_qwen3(seed=seed, num_key_value_heads=num_key_value_heads).save_pretrained(directory)
    (directory / "tokenizer.json").write_text('{"version": "1.0"}', encoding="utf-8")
    return directory


def random_row(
    name: str,
    *,
    rng: np.random.Generator,
    length: int | None = None,
    version: int | None = None,
    task_id: str = "train:0:q",
    advantage: float = 1.0,
    split: str = "train",
) -> DBRecordData:
    """Two completions with a tool result between them. `version` None: a supervised row without behaviour log-probs."""
    length = int(rng.integers(12, 30)) if length is None else length
    mask = np.zeros(length, dtype=np.bool_)
    mask[3 : length // 2] = True
    mask[length // 2 + 2 : length - 1] = True
    sampled = np.where(mask, rng.normal(-3.9, 0.2, length), 0).astype(np.float32)
    return DBRecordData(
        id=name,
        task_id=task_id,
        record_id=name.partition("/s")[0],
        split=split,
        token_ids=rng.integers(0, VOCABULARY_SIZE, length).astype(np.int32),
        loss_mask=mask,
        advantages=np.where(mask, np.float32(advantage), np.float32(0)).astype(np.float32),
        behaviour_logprobs=None if version is None else sampled,
        policy_versions=np.where(mask, -1 if version is None else version, -1).astype(np.int32),
        reward=1.0,
    )


def run_config(base: Path, *, model_dir: Path, **sections: dict[str, Any]) -> RunConfig:
    """Settings of a small run below `base`; `sections` override single values."""
    values: dict[str, dict[str, Any]] = {
        "run": {"output_dir": str(base), "run_name": "tiny"},
        "store": {"db_timeout_s": 5.0},
        "model": {"model_name_or_path": str(model_dir)},
        "rollout": {},
        "algo": {},
        "loss": {},
        "train": {"learning_rate": 1e-2, "report_to": "none", "data_timeout_s": 5.0, "max_steps": 3, "save_steps": 2},
    }
    for section, overrides in sections.items():
        values.setdefault(section, {}).update(overrides)
    return RunConfig.model_validate(values)
