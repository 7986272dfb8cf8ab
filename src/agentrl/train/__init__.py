"""AgentRL: train."""
