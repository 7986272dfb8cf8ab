"""AgentRL: evaluate."""
