"""AgentRL: store."""
