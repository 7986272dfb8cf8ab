"""The composition root: the only package that knows every adapter, and the `agentrl` console command."""
