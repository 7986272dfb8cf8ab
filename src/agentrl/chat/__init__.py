"""Conversations as token ids, and completions as text, reasoning and tool calls."""

from agentrl.chat.format import ChatFormat, Message
from agentrl.chat.parser import ParsedCompletion, parse_completion

__all__ = ["ChatFormat", "Message", "ParsedCompletion", "parse_completion"]
