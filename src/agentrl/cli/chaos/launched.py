"""The launch that chaos tortures: a child of this process, its environment, and how far its trainer has come."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.cli.launch.processes import RANK_VARIABLES, log_path, write_config
from agentrl.cli.launch.supervisor import LOCK_WAIT_S, Guard, child_environment, log_tail
from agentrl.config import RunConfig
from agentrl.config.load import ENVIRONMENT_PREFIX, PLAIN_VARIABLES
from agentrl.config.secrets import secret_settings

POLL_S = 0.1
STOP_GRACE_S = LOCK_WAIT_S  # a launcher stops its processes stage by stage, then their leftovers, as its guard would
LOG_NAME = "chaos_launch"


@dataclass(slots=True, kw_only=True)
class LaunchedRun:
    """`agentrl launch` of one configuration, as a child that may be killed and started again."""

    config: RunConfig
    guard: Guard
    proxy_port: int | None  # of the proxy all processes reach the database through
    is_being_killed: bool = False  # by us: its end is no end of the run
    _process: subprocess.Popen[bytes] | None = None
    _environ: Mapping[str, str] = field(init=False)
    _config_path: Path = field(init=False)

    def __post_init__(self) -> None:
        self._environ = launch_environment(self.config, environ=os.environ, proxy_port=self.proxy_port)
        self._config_path = self.config.run.run_dir / "chaos.json"
        write_config(self.config, path=self._config_path)

    @property
    def log_path(self) -> Path:
        """Where the launcher's output goes."""
        return log_path(self.config, LOG_NAME, 0)

    @property
    def pid(self) -> int:
        """The launcher's process id."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Launch, or launch again."""
        name = self.config.run.run_name
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "agentrl.cli.main", "launch", name, "--config", str(self._config_path)],
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        self.guard.track(self.pid, stage=0)

    def exit_code(self) -> int | None:
        """How the launch ended; None while it runs, or is about to be started again."""
        if self._process is None or self.is_being_killed:
            return None
        return self._process.poll()

    async def kill_and_restart(self) -> None:
        """SIGKILL the launcher, and launch again."""
        assert self._process is not None
        self.is_being_killed = True
        self._process.kill()
        await self._gone(self._process, within_s=STOP_GRACE_S)
        self.guard.forget(self._process.pid)
        self.start()
        self.is_being_killed = False

    async def stop(self) -> None:
        """Have the launcher stop everything; what it does not manage in time is left to its guard."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
            if not await self._gone(process, within_s=STOP_GRACE_S):
                process.kill()
                await self._gone(process, within_s=STOP_GRACE_S)
        self.guard.forget(process.pid)

    def end_of_log(self) -> str:
        """The launcher's last words."""
        return log_tail(self.log_path)

    @staticmethod
    async def _gone(process: subprocess.Popen[bytes], *, within_s: float) -> bool:
        return await until(lambda: process.poll() is not None, within_s=within_s)


def launch_environment(config: RunConfig, *, environ: Mapping[str, str], proxy_port: int | None) -> dict[str, str]:
    """The launcher's environment: its settings come from the configuration file alone, secrets and proxy from here."""
    kept = child_environment(environ, threads=1, drop_prefixes=(ENVIRONMENT_PREFIX, *PLAIN_VARIABLES, *RANK_VARIABLES))
    settings = secret_settings(config)
    if config.store.db_connection_string is not None:
        settings = {**settings, "db_connection_string": config.store.db_connection_string}
    if proxy_port is not None:
        settings = {**settings, "db_proxy_port": str(proxy_port)}
    return {**kept, **{f"{ENVIRONMENT_PREFIX}{name.upper()}": value for name, value in settings.items()}}


def newest_step(config: RunConfig) -> int:
    """The newest optimizer step in the run's metrics.jsonl; 0 before the first."""
    path = config.run.run_dir / "metrics.jsonl"
    if not path.is_file():
        return 0
    lines = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    return int(json.loads(lines[-1])["step"]) if lines else 0


async def until(condition: Callable[[], bool], *, within_s: float) -> bool:
    """Poll until the condition holds or the time is over; whether it holds."""
    deadline = asyncio.get_running_loop().time() + within_s
    while not condition():
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(POLL_S)
    return True
