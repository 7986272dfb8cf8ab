"""The environment variables by which a launch knows what it started, wherever that ended up, and that it lives."""

LAUNCH_MARK = "LAUNCHED_BY_AGENTRL"
"""`LOCK/LOCK#LIFE`: the lock files of the launch, and one life of one of its children. Handed on to tool servers."""

PULSE_FILE = "PULSE_FILE_OF_AGENTRL"
"""The file by which a child of a launch shows that it lives."""
