"""AgentRL: algo."""
