"""AgentRL: cli."""
