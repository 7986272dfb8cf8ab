#!/usr/bin/env bash
# The whole suite, set-up included: tests/run.sh [pytest arguments]
# shellcheck disable=SC2034 # read by setup.sh
extras=dev
# shellcheck source=assets/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/../assets/setup.sh"

export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
exec .venv/bin/python -m pytest --numprocesses 2 --dist loadfile "$@"
