"""Several gloo ranks on this machine, for tests: each is a fork of a server that has torch imported already.

Functions run in ranks must stand in a module of tests/*.py: a test module has no name another process could import.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

JOIN_TIMEOUT_S = 100.0
FSDP2_ENVIRONMENT = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}
"""What `accelerate launch --config_file assets/fsdp2_dst.yml` tells its ranks."""


ZERO3_ENVIRONMENT = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
    "DS_ACCELERATOR": "cpu",
}
"""What it tells them with assets/deepspeed_zero3.yml, and that there is no GPU."""


needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason='needs deepspeed: pip install "agentrl[gpu]"'
)


def run_ranks(
    function: Callable[..., None],
    *arguments: object,
    num_ranks: int,
    port: int,
    scratch: Path,
    environment: Mapping[str, str] = FSDP2_ENVIRONMENT,
) -> None:
    """Run function(*arguments) in every rank; fails with a rank's traceback if one fails or does not end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["agentrl.train.session", "transformers.models.qwen3.modeling_qwen3"])
    scratch.mkdir(parents=True, exist_ok=True)
    ranks = []
    for rank in range(num_ranks):
        own = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        log = scratch / f"rank_{rank}.log"
        log.unlink(missing_ok=True)
        ranks.append(context.Process(target=_one_rank, args=(function, arguments, {**environment, **own}, log)))
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(JOIN_TIMEOUT_S)
    late = [process for process in ranks if process.is_alive()]
    for process in late:
        process.kill()
        process.join()
    failures = "\n".join(path.read_text() for path in sorted(scratch.glob("rank_*.log")))
    assert not late, f"{len(late)} ranks did not end within {JOIN_TIMEOUT_S:g} s\n{failures}"
    assert not failures, failures
    assert all(process.exitcode == 0 for process in ranks), [process.exitcode for process in ranks]


def _one_rank(
    function: Callable[..., None], arguments: tuple[object, ...], environment: Mapping[str, str], log: Path
) -> None:
    os.environ.update(environment)
    try:
        function(*arguments)
    except BaseException:  # noqa: BLE001  # the process ends here; its parent shows what it wrote
        log.write_text(traceback.format_exc(), encoding="utf-8")
        os._exit(1)  # the other ranks wait in a collective: do not wait for them
