"""Any set of tool servers behind one address: `agentrl tools serve` (docs/gateway.md).

guard.py     token, size, slow clients          replies.py   results as HTTP and MCP replies
app.py       /mcp, /mcpapi, /health, /metrics    calls.py     limits, deadlines, counts
serving.py   the listening process               metrics.py   Prometheus text
"""
