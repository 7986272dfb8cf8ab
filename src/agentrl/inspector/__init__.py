"""AgentRL: inspector."""
