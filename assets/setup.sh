# shellcheck shell=bash
# Sourced by the example scripts, tests/run.sh and .ci/run: goes to the repository root and makes .venv ready.
# `extras=dev` before sourcing adds the development tools. Does nothing when nothing changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ ! -x .venv/bin/python ]]; then
  python=${PYTHON:-python3}
  if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then
    echo "AgentRL needs Python 3.11, 3.12 or 3.13; '$python' is $("$python" --version 2>&1 || echo missing)." \
      "Install one and set PYTHON=/path/to/python3.12" >&2
    exit 2
  fi
  echo "Creating the virtual environment .venv with $("$python" --version)"
  if ! "$python" -m venv .venv; then
    rm -rf .venv
    echo "'$python -m venv' failed; on Debian and Ubuntu: apt install python3-venv" >&2
    exit 2
  fi
fi

stamp=.venv/.installed${extras:+-$extras}
wanted=$(cat requirements.txt pyproject.toml | cksum)
if [[ ! -f $stamp || $(<"$stamp") != "$wanted" ]]; then
  echo "Installing the requirements into .venv (about 1.5 GB, some minutes the first time)"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check \
    --requirement requirements.txt --editable ".${extras:+[$extras]}"
  echo "$wanted" >"$stamp"
fi
