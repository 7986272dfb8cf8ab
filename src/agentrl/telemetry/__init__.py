"""What processes write for people: metrics.jsonl and log files."""

from agentrl.telemetry.jsonl import JsonlSink
from agentrl.telemetry.logs import setup_logging

__all__ = ["JsonlSink", "setup_logging"]
