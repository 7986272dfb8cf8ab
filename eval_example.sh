#!/usr/bin/env bash
# Version 0 against the newest policy of a run, on the held-out tasks: ./eval_example.sh [RUN_NAME] [--setting value ...]
# shellcheck source=assets/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/assets/setup.sh"

exec .venv/bin/agentrl eval --run_name demo "$@"
