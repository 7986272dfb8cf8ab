"""MCP servers that come with AgentRL: `python -m agentrl.tools.servers.calculator`, `... .search`."""
