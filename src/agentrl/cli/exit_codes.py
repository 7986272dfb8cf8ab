"""Exit codes of `agentrl`: 0 done, 1 failed, 2 the user can fix it, 3 an alarm, 4 budget spent, 130 interrupted."""

EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_STOPPED = 3
EXIT_BUDGET = 4
EXIT_INTERRUPTED = 130
