#!/usr/bin/env bash
# GRPO from nothing to a rising reward on a laptop: ./grpo_example.sh [RUN_NAME] [--setting value ...]
# With your own model and tasks: --model_name_or_path DIR --train_file FILE --mcp_config FILE
# shellcheck source=assets/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/assets/setup.sh"

exec .venv/bin/agentrl launch --profile laptop --run_name demo "$@"
