"""AgentRL: database-centric, decoupled reinforcement learning for tool-using language agents."""
