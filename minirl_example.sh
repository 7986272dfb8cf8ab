#!/usr/bin/env bash
# MINIRL on a laptop: ./minirl_example.sh [RUN_NAME] [--setting value ...]
# shellcheck source=assets/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/assets/setup.sh"

exec .venv/bin/agentrl launch --profile laptop --run_name minirl \
  --loss_calculater MINIRL \
  --token_level_loss false \
  --strict_in_bound true \
  --skip_length_normalization true \
  "$@"
