"""The environment variable by which a launch knows what it started, wherever that process ended up."""

LAUNCH_MARK = "LAUNCHED_BY_AGENTRL"
"""`LOCK/LOCK#LIFE`: the lock files of the launch, and one life of one of its children. Handed on to tool servers."""
