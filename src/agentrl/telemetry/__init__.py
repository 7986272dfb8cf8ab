"""AgentRL: telemetry."""
