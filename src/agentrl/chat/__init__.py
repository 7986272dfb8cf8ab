"""AgentRL: chat."""
