"""MCP servers that come with AgentRL, each `python -m agentrl.tools.servers.NAME`: see docs/tool_servers.md."""
