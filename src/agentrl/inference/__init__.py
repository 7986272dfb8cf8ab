"""Clients of SGLang-compatible inference services. The embedded engine (needs torch) is in `engine` and `serve`."""

from agentrl.inference.client import EngineClient, EngineLoad, ModelInfo
from agentrl.inference.router import RoutedClient

__all__ = ["EngineClient", "EngineLoad", "ModelInfo", "RoutedClient"]
