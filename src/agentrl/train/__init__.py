"""The trainer: `agentrl.train.loop.train` plans, trains, publishes and commits. Importing the loop loads torch."""
