"""Configuration: one pydantic model per section, all in `RunConfig`. No torch, no I/O but reading the file given."""

from agentrl.config.model_section import ModelConfig
from agentrl.config.sections import (
    AlgoConfig,
    CostConfig,
    InferenceConfig,
    JournalConfig,
    LossConfig,
    ReflectionConfig,
    RolloutConfig,
    RunConfig,
    RunSection,
    StoreConfig,
    ToolsConfig,
    TrainConfig,
)

__all__ = [
    "AlgoConfig",
    "CostConfig",
    "InferenceConfig",
    "JournalConfig",
    "LossConfig",
    "ModelConfig",
    "ReflectionConfig",
    "RolloutConfig",
    "RunConfig",
    "RunSection",
    "StoreConfig",
    "ToolsConfig",
    "TrainConfig",
]
