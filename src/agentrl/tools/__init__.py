"""AgentRL: tools."""
