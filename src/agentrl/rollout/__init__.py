"""AgentRL: rollout."""
