#!/usr/bin/env bash
# Learning to reflect, on a laptop (docs/mr_search.md): ./mr_search_example.sh [RUN_NAME] [--setting value ...]
# The same with one long episode: --episodes 1 --tool_calls_per_episode 6 --max_turns 12 --advantage group_norm
# shellcheck source=assets/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/assets/setup.sh"

exec .venv/bin/agentrl launch --profile mr_search_laptop --run_name mr_search "$@"
