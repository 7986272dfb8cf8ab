"""`agentrl launch`: starts, watches and stops every process of a run on one machine."""
