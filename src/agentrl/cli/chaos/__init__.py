"""`agentrl chaos`: launches a run, injects faults on a schedule that its seed decides, and audits what is left."""
