"""Tool-call formats by the name of `--tool_call_parser` (docs/tool_call_formats.md)."""

from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType

from agentrl.chat.formats.deepseek import DeepSeekV3Format, DeepSeekV31Format
from agentrl.chat.formats.hermes import HermesFormat
from agentrl.chat.formats.interface import CallBlock, CallFormat
from agentrl.chat.formats.llama3 import Llama3Format
from agentrl.chat.formats.minicpm import MiniCpmFormat
from agentrl.chat.formats.mirorl import MiroRlFormat
from agentrl.chat.formats.mistral import MistralFormat
from agentrl.chat.formats.pythonic import PythonicFormat
from agentrl.chat.formats.qwen3_coder import Qwen3CoderFormat
from agentrl.errors import ConfigError

__all__ = ["CALL_FORMATS", "CallBlock", "CallFormat", "get_call_format"]

_HERMES = HermesFormat()

CALL_FORMATS: Mapping[str, CallFormat] = MappingProxyType(
    {
        "hermes": _HERMES,
        "qwen": _HERMES,
        "qwen25": _HERMES,
        "qwen3_coder": Qwen3CoderFormat(),
        "llama3": Llama3Format(),
        "pythonic": PythonicFormat(),
        "deepseekv3": DeepSeekV3Format(),
        "deepseekv31": DeepSeekV31Format(),
        "mistral": MistralFormat(),
        "minicpm": MiniCpmFormat(),
        "mirorl": MiroRlFormat(),
    }
)
"""SGLang's parser names where it has the format, so that a launch script means the same on both sides."""


def get_call_format(name: str) -> CallFormat:
    """The format of that name. Raises ConfigError naming the nearest known one."""
    if name not in CALL_FORMATS:
        nearest = get_close_matches(name, CALL_FORMATS, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(CALL_FORMATS)}"
        raise ConfigError(f"tool_call_parser = {name!r}: no such format; {hint}")
    return CALL_FORMATS[name]
