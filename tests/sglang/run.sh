#!/usr/bin/env bash
# The engine conformance suite against a real SGLang server on this machine's CPU: tests/sglang/run.sh [pytest arguments]
# Optional and not part of CI: the first run installs about 3 GB into data/sglang/venv (SGLANG_VENV), then starting takes
# about a minute. Where SGLang cannot be installed it says so and ends with status 0.
# shellcheck disable=SC2034 # read by setup.sh
extras=dev
# shellcheck source=assets/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../assets/setup.sh"

version=0.5.23
work=$PWD/data/sglang
venv=${SGLANG_VENV:-$work/venv}
port=${SGLANG_PORT:-31000}
start_timeout_s=${SGLANG_START_TIMEOUT_S:-300}
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
mkdir -p "$work"

skip() {
  echo "SKIPPED: $*" >&2
  exit 0
}

# SGLang pins CUDA builds; on a CPU its other requirements are installed by name, and it without its own.
install() {
  local pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
  "${PYTHON:-python3}" -m venv "$venv" || return
  "${pip[@]}" --no-deps "sglang==$version" || return
  "${pip[@]}" torch==2.13.0 transformers==5.19.0 tokenizers==0.23.2 aiohttp fastapi 'uvicorn>=0.51' uvloop orjson msgspec \
    'pyzmq>=25.1.2' psutil pybase64 pydantic python-multipart 'prometheus-client>=0.20.0' setproctitle \
    partial_json_parser interegular pillow requests scipy numpy tqdm xgrammar==0.2.7 xxhash zstandard einops \
    openai==2.8.0 openai-harmony==0.0.4 sentencepiece==0.2.1 tiktoken IPython packaging py-spy python-dateutil regex \
    watchfiles 'llguidance>=1.7.6,<2' compressed-tensors==0.18.0 'anthropic>=0.20.0' blobfile==3.0.0 easydict distro \
    gguf numba==0.65.1 ninja dill cffi jsonschema || return
  "${pip[@]}" --no-deps soundfile==0.13.1 timm==1.0.25 torchvision==0.28.0
}

stamp=$venv/.installed-$version
if [[ ! -f $stamp ]]; then
  [[ $(uname -s) == Linux ]] || skip "SGLang is installed on Linux only"
  echo "Installing SGLang $version into $venv (3 GB, about five minutes)"
  if ! install >"$work/install.log" 2>&1; then
    tail -n 5 "$work/install.log" >&2
    skip "SGLang $version could not be installed here; the whole log is in $work/install.log"
  fi
  touch "$stamp"
fi

PYTHONPATH=tests .venv/bin/python - "$work" <<'PYTHON'
import sys
from pathlib import Path

import tiny_lm

for name, seed in (("a", 1), ("b", 2)):
    tiny_lm.write_lm(Path(sys.argv[1]) / name, seed=seed)
PYTHON

setsid "$venv/bin/python" tests/sglang/launch_cpu.py --model-path "$work/a" --device cpu --attention-backend torch_native \
  --dtype float32 --host 127.0.0.1 --port "$port" --max-total-tokens 20000 --max-running-requests 16 \
  --context-length 512 --disable-overlap-schedule --weight-version 0 >"$work/server.log" 2>&1 &
server=$!

# SGLang's own shutdown can wait a minute for core dumps; the server leads a process group of its own.
stop_server() {
  kill -TERM "$server" 2>/dev/null || return 0
  for _ in {1..50}; do
    kill -0 "$server" 2>/dev/null || break
    sleep 0.2
  done
  kill -KILL -- "-$server" 2>/dev/null || true
}
trap stop_server EXIT

echo "Waiting for SGLang at port $port (log: $work/server.log)"
deadline=$((SECONDS + start_timeout_s))
until "$venv/bin/python" -c \
  "import sys, urllib.request as r; sys.exit(r.urlopen('http://127.0.0.1:$port/ready', timeout=5).status != 200)" 2>/dev/null; do
  if ! kill -0 "$server" 2>/dev/null; then
    tail -n 20 "$work/server.log" >&2
    skip "SGLang $version does not start on this machine"
  fi
  if ((SECONDS > deadline)); then
    tail -n 20 "$work/server.log" >&2
    skip "SGLang was not ready after $start_timeout_s s"
  fi
  sleep 2
done

SGLANG_URL=http://127.0.0.1:$port SGLANG_MODEL_A=$work/a SGLANG_MODEL_B=$work/b \
  .venv/bin/python -m pytest -m sglang --timeout 300 tests/contract "$@"
