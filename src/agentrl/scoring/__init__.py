"""AgentRL: scoring."""
