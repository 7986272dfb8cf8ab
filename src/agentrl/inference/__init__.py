"""AgentRL: inference."""
